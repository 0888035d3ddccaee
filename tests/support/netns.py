"""Several hosts on one machine, joined by a switch with links of a chosen rate: real MPI over TCP between them.

Each host is a network namespace with its own host name and TMPDIR. Its link to the switch, a bridge in another
namespace, is limited to ``rate`` in each direction. Hosts share the machine's cores, memory and files.
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
"""Variables that make Open MPI use the links between the hosts."""
ETC = Path("/etc/netns")
"""Where ip looks for a namespace's replacements of files in /etc."""
PREFIX = "hpctrain"
"""Prefix of namespaces, hpctrain-<pid of the test>-<host>, so that those of a killed test can be found and removed."""
REFUSED = r"not permitted|[Pp]ermission denied|not supported|qdisc kind is unknown|Unknown device type|Read-only file"
"""Messages of ip, tc and unshare if the kernel or a container forbids the request."""


class NotPermitted(Exception):
    """This machine does not permit network namespaces; the message starts as CI requires of a skip reason."""


@dataclass(frozen=True)
class Network:
    """A network of running hosts."""

    names: tuple[str, ...]
    """Names of the hosts and of their namespaces."""
    folder: Path

    @property
    def addresses(self) -> list[str]:
        """IP addresses of the hosts, in order."""
        return [f"{SUBNET}.{index + 1}" for index in range(len(self.names))]

    def on(self, host: int, *words: object) -> list[str]:
        """Command that runs words on a host, counted from 0: ``subprocess.run(network.on(1, "ip", "address"))``."""
        return [str(self.folder / "agent"), self.addresses[host], shlex.join(map(str, words))]

    def cut(self, host: int) -> None:
        """Cut the link of a host, as if its cable were pulled."""
        self._set_link(host, "down")

    def heal(self, host: int) -> None:
        """Restore the link of a host."""
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
        """Run a Python file (Path) or module (str) on the first hosts; arguments as in ``mpi.mpirun``. Open MPI 5."""
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
            _end_processes(self.names)  # a killed mpirun leaves its daemons on other hosts
        assert not check or result.returncode == 0, f"exit {result.returncode}: {command[-1]}\n{result.output}"
        return result


@contextmanager
def network(hosts: int, rate: str, folder: Path) -> Iterator[Network]:
    """Create hosts with links of a rate such as ``1gbit`` or ``200mbit``, and remove them afterwards.

    Args:
        hosts: number of hosts, up to 200.
        rate: rate of each link in each direction, in tc's notation.
        folder: an empty folder that all hosts see, such as tmp_path.

    Raises:
        NotPermitted: the kernel or a container forbids it.
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
    """Create a host with one link, shaped at both ends to limit both directions."""
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
    """Write the script that mpirun calls instead of ssh, with a host and a command.

    It sets the host name, by which MPI distinguishes hosts.
    """
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
    """Write each namespace's /etc/hosts, so that hosts find each other by name."""
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
    """Remove namespaces of tests that were killed."""
    _remove([name for name in _existing() if not Path("/proc", name.split("-")[1]).exists()])


def _remove(names: Sequence[str]) -> None:
    left = [name for name in names if name in _existing()]
    _end_processes(left)
    for name in left:
        _do("ip", "netns", "del", name)
        shutil.rmtree(ETC / name, ignore_errors=True)
    for name in names:  # left by Open MPI ranks that were killed with their host
        for segment in Path("/dev/shm").glob(f"sm_segment.{name}.*"):
            segment.unlink(missing_ok=True)


def _end_processes(names: Sequence[str], patience_s: float = mpi.PATIENCE_S) -> None:
    """Kill all processes on the hosts, and return when they are gone."""
    deadline = time.monotonic() + patience_s
    while pids := [int(pid) for name in names for pid in _do("ip", "netns", "pids", name).split()]:
        assert time.monotonic() < deadline, f"processes {pids} of {', '.join(names)} do not end"
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.05)
