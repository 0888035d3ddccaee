"""Several hosts on one machine, joined by a switch with links of a chosen rate: real MPI over TCP between them.

Each host is a network namespace with its own host name and TMPDIR; its link to the switch (a bridge in one more
namespace) lets through ``rate`` in each direction. They share the machine's cores, memory and files.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import NOT_PERMITTED
from tests.support import mpi

PROGRAMS = ("ip", "tc", "unshare", "hostname")
SEARCH_PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
SUBNET = "10.77.0"
INTERFACES = {
    **{name: f"{SUBNET}.0/24" for name in ("PRTE_MCA_prte_if_include", "OMPI_MCA_btl_tcp_if_include")},
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "self,sm,tcp",
}
"""Variables by which Open MPI uses the links between the hosts."""
ETC = Path("/etc/netns")
"""Where ip looks for what a namespace has in place of files of /etc."""
PREFIX = "hpctrain"
"""Names of namespaces: hpctrain-<pid of the test>-<host>, so that those of a killed test can be told and removed."""
REFUSED = r"not permitted|[Pp]ermission denied|not supported|qdisc kind is unknown|Unknown device type|Read-only file"
"""What ip, tc and unshare say where the kernel or a container forbids what they are asked."""


class NotPermitted(Exception):
    """This machine forbids it; the message begins as a skip reason must."""


@dataclass(frozen=True)
class Network:
    """Hosts that are up."""

    names: tuple[str, ...]
    """Of the hosts, and of their namespaces."""
    folder: Path

    @property
    def addresses(self) -> list[str]:
        """Of the hosts, in their order."""
        return [f"{SUBNET}.{index + 1}" for index in range(len(self.names))]

    def on(self, host: int, *words: object) -> list[str]:
        """The command that runs words on a host, from 0: ``subprocess.run(network.on(1, "ip", "address"))``."""
        return [str(self.folder / "agent"), self.addresses[host], shlex.join(map(str, words))]

    def cut(self, host: int) -> None:
        """Cuts the link of a host, as if its cable were pulled."""
        self._set_link(host, "down")

    def heal(self, host: int) -> None:
        """Joins the link again."""
        self._set_link(host, "up")

    def _set_link(self, host: int, state: str) -> None:
        switch = self.names[0].rpartition("-")[0] + "-switch"
        _do("ip", "-n", switch, "link", "set", f"port{host + 1}", state)

    def mpirun(
        self,
        hosts: int,
        program: Path | str,
        *args: object,
        ranks_per_host: int = 1,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        timeout: float = mpi.LAUNCH_S,
        check: bool = True,
    ) -> mpi.Result:
        """Runs a Python file (Path) or module (str) on the first hosts; arguments as in ``mpi.mpirun``. Open MPI 5."""
        launcher = mpi.find_mpirun()
        assert launcher, "no mpirun beside this Python or on PATH"
        places = ",".join(f"{address}:{ranks_per_host}" for address in self.addresses[:hosts])
        options = [
            *("--host", places, "-n", hosts * ranks_per_host, "--map-by", "slot", "--bind-to", "none"),
            *("--prtemca", "plm_ssh_agent", self.folder / "agent", "--prtemca", "prte_if_include", f"{SUBNET}.0/24"),
            *("--mca", "pml", "ob1", "--mca", "btl", "self,sm,tcp", "--mca", "btl_tcp_if_include", f"{SUBNET}.0/24"),
        ]
        target = [program] if isinstance(program, Path) else ["-m", program]
        command = self.on(0, launcher, *options, sys.executable, *target, *args)
        shared = {"PYTHONPATH": str(Path(__file__).parents[2])}
        try:
            result = mpi.run_in_group(command, mpi.rank_environment(shared | dict(env or {})), cwd, timeout)
        finally:
            _end_processes(self.names)  # daemons on other hosts are no children of a mpirun that had to be killed
        assert not check or result.returncode == 0, f"exit {result.returncode}: {command[-1]}\n{result.output}"
        return result


@contextmanager
def network(hosts: int, rate: str, folder: Path) -> Iterator[Network]:
    """Hosts with links of a rate such as ``1gbit`` or ``200mbit``; nothing of them remains afterwards.

    Args:
        hosts: how many, up to 200.
        rate: of each link in each direction, as tc writes it.
        folder: an empty one that all hosts see, such as tmp_path.

    Raises:
        NotPermitted: the kernel or a container does not let us.
    """
    _check_tools()
    _remove_of_the_dead()
    names = tuple(f"{PREFIX}-{os.getpid()}-{index + 1}" for index in range(hosts))
    switch = f"{PREFIX}-{os.getpid()}-switch"
    try:
        _do("ip", "netns", "add", switch)
        _do("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _do("ip", "-n", switch, "link", "set", "bridge", "up")
        for index, name in enumerate(names):
            _connect(name, f"{SUBNET}.{index + 1}/24", switch, f"port{index + 1}", rate)
        made = Network(names, folder)
        _write_agent(made)
        _write_names(made)
        yield made
    finally:
        _remove([*names, switch])


def _connect(host: str, address: str, switch: str, port: str, rate: str) -> None:
    """A host with one shaped link; both of its ends are shaped, for both directions."""
    _do("ip", "netns", "add", host)
    _do("ip", "-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", host)
    _do("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
    _do("ip", "-n", host, "address", "add", address, "dev", "eth0")
    for device in ("lo", "eth0"):
        _do("ip", "-n", host, "link", "set", device, "up")
    for namespace, device in ((switch, port), (host, "eth0")):
        shape = ("rate", rate, "burst", "128k", "latency", "100ms")
        _do("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", *shape)


def _write_agent(made: Network) -> None:
    """What mpirun calls in place of ssh, with a host and a command. MPI tells hosts by their names."""
    cases = []
    for name, address in zip(made.names, made.addresses, strict=True):
        temporary = made.folder / name
        temporary.mkdir()
        cases.append(f"{address}) name={name} TMPDIR={shlex.quote(str(temporary))} ;;")
    agent = made.folder / "agent"
    lines = [
        "#!/bin/sh",
        'host=$1; shift; case "$host" in',
        *cases,
        '*) echo "no host $host" >&2; exit 1 ;; esac',
        "export TMPDIR; PATH=$PATH:/usr/sbin:/sbin",
        'exec ip netns exec "$name" unshare --uts sh -c "hostname $name; $*"',
    ]
    agent.write_text("\n".join(lines) + "\n")
    agent.chmod(0o755)


def _write_names(made: Network) -> None:
    """The hosts find each other by their names: ip shows each namespace its own /etc/hosts."""
    lines = (f"{address} {name}\n" for name, address in zip(made.names, made.addresses, strict=True))
    text = "".join([Path("/etc/hosts").read_text(), *lines])
    try:
        for name in made.names:
            (ETC / name).mkdir(parents=True, exist_ok=True)
            (ETC / name / "hosts").write_text(text)
    except OSError as error:
        raise NotPermitted(f"{NOT_PERMITTED}{ETC}: {error.strerror}") from error


def _check_tools() -> None:
    absent = [name for name in PROGRAMS if shutil.which(name, path=SEARCH_PATH) is None]
    assert not absent, f"this machine lacks {', '.join(absent)} (Debian: iproute2, util-linux, hostname)"
    if os.geteuid() != 0:
        raise NotPermitted(NOT_PERMITTED + "network namespaces need root")
    _do("unshare", "--uts", "true")


def _do(*words: str) -> str:
    environment = os.environ | {"PATH": SEARCH_PATH, "LC_ALL": "C"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=mpi.PATIENCE_S)
    if done.returncode == 0:
        return done.stdout
    if re.search(REFUSED, done.stderr):
        raise NotPermitted(f"{NOT_PERMITTED}{' '.join(words)}: {done.stderr.strip()}")
    raise AssertionError(f"{' '.join(words)}: {done.stderr}")


def _existing() -> list[str]:
    return [line.split()[0] for line in _do("ip", "netns", "list").splitlines() if line.startswith(f"{PREFIX}-")]


def _remove_of_the_dead() -> None:
    """Namespaces of a test that was killed."""
    _remove([name for name in _existing() if not Path("/proc", name.split("-")[1]).exists()])


def _remove(names: Sequence[str]) -> None:
    left = [name for name in names if name in _existing()]
    _end_processes(left)
    for name in left:
        _do("ip", "netns", "del", name)
        shutil.rmtree(ETC / name, ignore_errors=True)
    for name in names:  # of Open MPI's ranks that were killed with their host
        for segment in Path("/dev/shm").glob(f"sm_segment.{name}.*"):
            segment.unlink(missing_ok=True)


def _end_processes(names: Sequence[str], patience_s: float = mpi.PATIENCE_S) -> None:
    """Kills what still runs on the hosts, and returns when it is gone."""
    deadline = time.monotonic() + patience_s
    while pids := [int(pid) for name in names for pid in _do("ip", "netns", "pids", name).split()]:
        assert time.monotonic() < deadline, f"processes {pids} of {', '.join(names)} do not end"
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.05)
