"""A real two-node Slurm cluster on this machine, with a third node that a test may start.

Each slurmd runs in its own UTS, PID and mount namespaces: MPI sees separate hosts, killing a node kills all of its
processes, and one node's scratch can be made read-only. Needs root and Debian's slurmctld, slurmd, slurm-client, munge.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from hpctrain.programs.plain_command import reserve_port
from tests.conftest import NOT_PERMITTED
from tests.support.mpi import GIVES_WAY, LAUNCH_S, PATIENCE_S, python, python_path
from tests.support.warm_ranks import WARM

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "unshare", "setpriv")
NODES = ("n1", "n2")
THIRD = "n3"
"""A node that is down until a test starts it, in the partition ``three`` only."""
SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

RANKS = {
    # The nodes share one machine, but must not use shared memory between them; TCP uses the loopback only.
    "OMPI_MCA_btl": "tcp,self",
    "OMPI_MCA_btl_tcp_if_include": "lo",
    "OMPI_MCA_pml": "ob1",
    **GIVES_WAY,
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_ALLOW_RUN_AS_ROOT": "1",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMP_NUM_THREADS": "1",
}

CONFIGURATION = """\
ClusterName=mini
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
AuthType=auth/munge
CredType=cred/munge
# A requeued job may start once the credential of its last start has expired.
AuthInfo=socket={folder}/munge.sock,cred_expire=5
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerParameters=sched_interval=1,batch_sched_delay=0,bf_interval=1
GresTypes=gpu
MpiDefault=none
ReturnToService=2
KillWait=12
# A node that lost its power is given up after seconds.
SlurmdTimeout=10
# Tests ask for jobs that ended long ago.
MinJobAge=36000
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
SlurmdSpoolDir={folder}/spool.%n
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdLogFile={folder}/slurmd.%n.log
# One folder a node, or srun --mpi=pmix fails.
TmpFS={folder}/tmpfs.%n
NodeName=n1 NodeHostname=n1 NodeAddr=127.0.0.1 Port={port_1} CPUs=8 RealMemory=8000 Gres=gpu:2
NodeName=n2 NodeHostname=n2 NodeAddr=127.0.0.1 Port={port_2} CPUs=8 RealMemory=8000 Gres=gpu:2
NodeName=n3 NodeHostname=n3 NodeAddr=127.0.0.1 Port={port_3} CPUs=8 RealMemory=8000 Gres=gpu:2
PartitionName=debug Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO PriorityTier=2
# Jobs here make room for those in debug, and have some seconds to save.
PartitionName=scavenge Nodes=n[1-2] MaxTime=INFINITE State=UP OverSubscribe=NO PriorityTier=1 GraceTime=30
PartitionName=three Nodes=ALL MaxTime=INFINITE State=UP OverSubscribe=NO PriorityTier=2
"""


def missing() -> str | None:
    """Why this machine cannot run the cluster, or None."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=SEARCH_PATH) is None]
    if absent:
        return f"{', '.join(absent)} not installed"
    if not list(Path("/usr/lib").glob("*/pmix2/lib/libpmix.so")) + list(Path("/usr/lib").glob("*/libpmix.so")):
        return "libpmix-dev not installed: srun --mpi=pmix needs it"
    if os.geteuid() != 0:
        return NOT_PERMITTED + "the cluster needs root"
    if subprocess.run(["unshare", "--uts", "--pid", "--mount", "--fork", "true"], capture_output=True).returncode:
        return NOT_PERMITTED + "namespaces"
    return None


@dataclass
class Cluster:
    """A running Slurm cluster. ``environment`` is what its commands and hpctrain's need."""

    folder: Path
    environment: dict[str, str]
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def run(
        self, *command: str | Path, timeout: float = PATIENCE_S, check: bool = True, **options
    ) -> subprocess.CompletedProcess:  # type: ignore[type-arg,no-untyped-def]
        """Run a command as a user of this cluster would."""
        options.setdefault("env", self.environment)
        done = subprocess.run(
            [str(word) for word in command], capture_output=True, text=True, timeout=timeout, **options
        )
        if check and done.returncode:
            raise AssertionError(
                f"{' '.join(map(str, command))} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
            )
        return done

    def state(self, job: str) -> str:
        """The job's state in the queue; empty once it is purged."""
        done = self.run("squeue", "--noheader", "--states=all", "--jobs", job, "--format=%T", check=False)
        return done.stdout.strip().split("\n")[0]

    def shown(self, job: str) -> str:
        """Everything that Slurm reports about the job."""
        return self.run("scontrol", "show", "job", job, check=False).stdout

    def wait(self, job: str, *states: str, timeout: float = LAUNCH_S) -> str:
        """Wait until the job is in one of these states, and return it."""
        return until(
            lambda: (state := self.state(job)) in states and state,
            timeout,
            lambda: f"job {job} is {self.state(job)}, not {states}\n{self.shown(job)}",
        )

    def processes(self, marker: str) -> dict[int, str]:
        """Pids, as seen from outside the nodes, of processes with the marker in command line or environment."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                environment = (folder / "environ").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if int(folder.name) != os.getpid() and (marker in command or marker in environment):
                found[int(folder.name)] = command
        return found

    def start_node(self, name: str) -> None:
        """Start a node, as after a reboot."""
        for part in ("spool", "tmpfs"):
            (self.folder / f"{part}.{name}").mkdir(exist_ok=True)
        scratch = self.folder / "scratch"
        scratch.mkdir(exist_ok=True)
        script = (
            f"hostname {name} && mount -t tmpfs none /dev/shm && mount -t tmpfs none {scratch} && "
            f"mount --bind {self.folder / 'hosts'} /etc/hosts && "
            f"exec slurmd -D -f {self.environment['SLURM_CONF']} -N {name}"
        )
        isolated = [
            "unshare",
            "--uts",
            "--pid",
            "--mount",
            "--fork",
            "--kill-child",
            "--mount-proc",
            "bash",
            "-c",
            script,
        ]
        self.daemons[name] = self.spawn(name, isolated)
        up = ("idle", "alloc", "mix")  # a job may be waiting for it
        until(
            lambda: self.node_state(name) in up,
            PATIENCE_S,
            lambda: f"{name} is {self.node_state(name)}: {self.log(name)}",
        )
        self.warm_up(name)

    def warm_up(self, name: str) -> None:
        """Make a node's ranks forks of a process that has imported PyTorch, as soon as that is ready."""
        path = self.socket(name)
        for old in (path, path.with_name(f"{path.name}.new")):
            old.unlink(missing_ok=True)
        words = ["-P", "-m", "tests.support.warm_ranks", str(path), "torch", str(self.init(name))]
        self.daemons[f"ranks-{name}"] = self.spawn(f"ranks-{name}", [*python("torch"), *words])

    def socket(self, name: str) -> Path:
        """Socket of the node's process that forks ranks."""
        return self.folder / f"ranks-{name}"

    def kill_node(self, name: str) -> None:
        """Kill every process on the node at once, as a power failure would."""
        os.kill(self.init(name), signal.SIGKILL)
        for daemon in (name, f"ranks-{name}"):
            self.daemons.pop(daemon).wait(PATIENCE_S)

    def init(self, name: str) -> int:
        """Pid of the node's init process, with which all of its processes end."""
        daemon = self.daemons[name].pid
        children = Path(f"/proc/{daemon}/task/{daemon}/children")
        # Slurm may take a node that has just been started for the one that was lost.
        return int(until(lambda: children.read_text().split(), PATIENCE_S, lambda: self.log(name))[0])

    def node_state(self, name: str) -> str:
        """The node's state: idle, mix, alloc, down ..."""
        return self.run("sinfo", "-h", "-n", name, "-o", "%t", check=False).stdout.strip()

    def in_node(self, name: str, *command: str | Path, check: bool = True) -> subprocess.CompletedProcess:  # type: ignore[type-arg]
        """Run a command in a node's namespaces."""
        return self.run("nsenter", "-t", str(self.init(name)), "-u", "-p", "-m", *command, check=check)

    def spawn(self, name: str, command: list[str]) -> subprocess.Popen[bytes]:
        """Start a daemon that ends with this process."""
        with (self.folder / f"{name}.out").open("ab") as out:
            return subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command],
                stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=self.environment, start_new_session=True,
            )  # fmt: skip

    def log(self, name: str) -> str:
        """The end of a daemon's log."""
        logs = [self.folder / f"{name}.out", self.folder / f"{name}.log", self.folder / f"slurmd.{name}.log"]
        return "\n".join(path.read_text()[-2000:] for path in logs if path.exists())


@contextmanager
def two_nodes(base: Path) -> Iterator[Cluster]:
    """Run a cluster with its files in a folder; at the end, kill it and everything on it."""
    folder, home = base / "slurm", base / "home"
    folder.mkdir()
    home.mkdir()
    folder.chmod(0o755)  # munged refuses a socket in a folder that others can write to
    environment = {
        "PATH": f"{Path(sys.executable).parent}:{SEARCH_PATH}",
        "PYTHONPATH": python_path(WARM, Path(__file__).parents[2]),
        "HOME": str(home),
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": os.environ.get("PYTHONDONTWRITEBYTECODE", ""),
        **RANKS,
    }
    holders = [reserve_port() for _ in range(4)]
    ports = [holder.getsockname()[1] for holder in holders]
    (folder / "slurm.conf").write_text(
        CONFIGURATION.format(
            folder=folder,
            host=socket.gethostname(),
            controller_port=ports[0],
            **{f"port_{node}": port for node, port in enumerate(ports[1:], 1)},
        )
    )
    # Fake GPUs must be device files.
    (folder / "gres.conf").write_text("NodeName=n[1-3] Name=gpu File=/dev/tty[0-1]\n")
    (folder / "hosts").write_text(f"127.0.0.1 localhost {' '.join((*NODES, THIRD))}\n{Path('/etc/hosts').read_text()}")
    (folder / "state").mkdir(exist_ok=True)
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    places = {"SLURM_CONF": str(folder / "slurm.conf"), "WARM_RANKS": str(folder / "ranks-%h")}
    cluster = Cluster(folder, {**environment, **places})
    try:
        munge = {"key-file": "munge.key", "socket": "munge.sock", "pid-file": "munge.pid", "seed-file": "munge.seed"}
        options = [f"--{option}={folder / name}" for option, name in munge.items()]
        cluster.daemons["munged"] = cluster.spawn("munged", ["munged", "--foreground", "--force", *options])
        until((folder / "munge.sock").exists, PATIENCE_S, lambda: cluster.log("munged"))
        cluster.daemons["slurmctld"] = cluster.spawn(
            "slurmctld", ["slurmctld", "-D", "-c", "-f", str(folder / "slurm.conf")]
        )
        until(
            lambda: cluster.run("scontrol", "ping", check=False).returncode == 0,
            PATIENCE_S,
            lambda: cluster.log("slurmctld"),
        )
        for name in NODES:
            cluster.start_node(name)
        for name in NODES:
            until(cluster.socket(name).exists, PATIENCE_S, lambda name=name: cluster.log(f"ranks-{name}"))
        yield cluster
    finally:
        for name in (*NODES, THIRD):
            if name in cluster.daemons and cluster.daemons[name].poll() is None:
                cluster.kill_node(name)
        for name in ("slurmctld", "munged"):
            if name in cluster.daemons:
                cluster.daemons[name].kill()  # asked to end, slurmctld waits 10 s for the nodes
                cluster.daemons[name].wait(PATIENCE_S)
        for holder in holders:
            holder.close()


def until(condition: Callable[[], object], timeout: float, explain: Callable[[], str] = str):  # type: ignore[no-untyped-def]
    """Poll a condition and return its first true value; fail with the explanation after ``timeout`` seconds.

    Pauses grow to half a second: squeue, and Slurm's answer, take more processor time than most jobs here.
    """
    begin = time.monotonic()
    while True:
        value = condition()
        if value:
            return value
        waited = time.monotonic() - begin
        if waited > timeout:
            raise AssertionError(f"waited {timeout} s in vain: {explain()}")
        time.sleep(min(0.05 + waited / 10, 0.5))
