"""Output of mpirun and srun: forwards it to the user, and parses reports of dead ranks (by pure functions)."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import stat
import time
from collections.abc import Iterable, Mapping
from typing import IO

from hpctrain.run.first_cause import Death, Standing
from hpctrain.system.quantities import numbers_in

BANNER = re.compile(rb"^=+\n=\s+BAD TERMINATION|^-+\nA daemon failed to report back", re.MULTILINE)
"""Start of MPICH's report on a dead rank and of Open MPI's on a host, on standard output. Programs may print such
lines too."""
OPEN_MPI_SIGNAL = re.compile(
    r"noticed\s+that\s+process\s+rank\s+(\d+)\s+with\s+PID\s+(\d+)\s+on\s+node\s+(\S+)\s+exited\s+on\s+signal\s+(\d+)"
)
OPEN_MPI_IMPROPER = re.compile(
    r"has\s+exited\s+due\s+to\s+process\s+rank\s+(\d+)\s+with\s+PID\s+(\d+)\s+on\s+node\s+(\S+)\s+(?:exiting\s+improperly|calling\s+\"init\")"
)
OPEN_MPI_CODE = re.compile(r"Process\s+name:\s+\[\S+?,(\d+)\]\s+Exit\s+code:\s+(\d+)")
HYDRA = re.compile(r"PID\s+(\d+)\s+RUNNING\s+AT\s+(\S+)\s+=\s+EXIT\s+CODE:\s+(\d+)")
SRUN = re.compile(r"srun: error: (\S+): tasks? ([\d,\-]+): (.+)")
CLOSED = re.compile(r"An error occurred in Socket closed\s+.*reported by process \[\d+,(\d+)\]")
"""Printed over TCP by a rank whose connection to another rank was closed."""
GAVE_UP = "Timed out waiting for job step to complete"
WAITS = re.compile(r"Waiting up to (\d+) seconds for job step to finish")
NOT_STARTED = re.compile(r"srun: error: task (\d+) launch failed: (.+)")
LOST_NODE = re.compile(
    r"DUE TO NODE.?FAIL|srun: error: .*[Nn]ode failure(?: on (?P<host>\S+))?"
    r"|srun: error: Task launch for \S+ failed on node (?P<unheard>\S+): Communication connection failure"
    r"|has\s+lost\s+communication\s+with\s+a\s+remote\s+daemon|daemon\s+has\s+(?:died|failed)"
    r"|Remote daemon\s*:\s*\[\S+\]\s+on\s+node\s+(?P<remote>\S+)"
)
FEW_HOSTS = 8
"""Most hosts assumed lost at once; if more are silent, srun just has not heard from them yet."""
NO_DAEMON = re.compile(r"daemon failed to report back after being spawned[\s\S]{0,900}?Remote host:\s+(\S+)")
"""Printed by Open MPI 5 on standard output."""


def deaths(text: str) -> list[Death]:
    """Returns the processes that the launcher reports as dead.

    Understands Open MPI 4 and 5, MPICH's hydra and srun. Ranks that called MPI_Abort do not count: they left a last
    word. srun reports deaths in any order, including those that it caused.
    """
    found = [
        Death(int(rank), int(pid) or None, host, signal=int(number))
        for rank, pid, host, number in OPEN_MPI_SIGNAL.findall(text)
    ]
    found += [Death(int(rank), int(pid) or None, host) for rank, pid, host in OPEN_MPI_IMPROPER.findall(text)]
    found += [Death(int(rank), exit_code=int(code)) for rank, code in OPEN_MPI_CODE.findall(text)]
    found += [Death(int(rank), standing=Standing.VICTIM) for rank in CLOSED.findall(text)]
    found += [_hydra(int(pid), host, int(code)) for pid, host, code in HYDRA.findall(text.replace("\n=", "\n ="))]
    begun = text.find("Terminating StepId")
    for line in SRUN.finditer(text):
        host, tasks, how = line.groups()
        found += [_srun(rank, host, how, line.start(), -1 < begun < line.start()) for rank in numbers_in(tasks)]
    return found


def lost_node(text: str, output: str = "") -> str | None:
    """Returns the node that the launcher says is lost, or whose daemon is; "" if not named, None if none is lost.

    ``output`` is the end of standard output, to which ranks may have written too.
    """
    hosts = [found["host"] or found["unheard"] or found["remote"] or "" for found in LOST_NODE.finditer(text)]
    return max([*hosts, *NO_DAEMON.findall(output)], default=None)


def refusal(text: str, output: str, host: str) -> str:
    """Returns the remote shell's message about a host on which mpirun could not start its daemon; empty if none."""
    lines = [line.strip() for line in text.splitlines() if host in line or "verification failed" in line]
    return lines[-1] if lines and host in NO_DAEMON.findall(output) else ""


def waits_s(text: str) -> float:
    """Returns the seconds that srun gives a step to end before it reports lost ranks; 0 if it is not ending one."""
    return max((float(seconds) for seconds in WAITS.findall(text)), default=0.0)


def not_started(text: str) -> tuple[list[int], str]:
    """Returns the ranks that Slurm could not start and its stated reason, which is rarely the real cause."""
    found = NOT_STARTED.findall(text)
    return sorted({int(rank) for rank, _ in found}), found[0][1].strip() if found else ""


def silent(text: str, ranks: Iterable[int]) -> list[int]:
    """Returns ranks that had not reported when srun gave up waiting: their node, or Slurm's daemon on it, is lost."""
    heard = _heard(text)
    return [rank for rank in ranks if rank not in heard] if GAVE_UP in text else []


def silent_hosts(text: str, hosts: Mapping[int, str]) -> set[str]:
    """Returns the hosts still silent while srun waits for a step to end and all other hosts have reported.

    A host is silent if none of its ranks has reported. Empty if srun does not wait, or more than FEW_HOSTS are silent.
    ``hosts`` maps ranks without a last word to their hosts.
    """
    heard = _heard(text) & hosts.keys()
    silent = {host for rank, host in hosts.items() if rank not in heard}
    reported = {hosts[rank] for rank in heard}
    return silent if waits_s(text) and reported and len(silent) <= FEW_HOSTS and not silent & reported else set()


def left(text: str, ranks: Iterable[int]) -> list[int]:
    """Returns which of these ranks, which left no word, exited with 0: srun reports only other exit codes."""
    heard = _heard(text)
    return [rank for rank in ranks if rank not in heard] if heard and GAVE_UP not in text else []


def _heard(text: str) -> set[int]:
    return {rank for _, tasks, _ in SRUN.findall(text) for rank in numbers_in(tasks)}


SRUN_SIGNALS = {
    "Killed": signal.SIGKILL,
    "Terminated": signal.SIGTERM,
    "Aborted": signal.SIGABRT,
    "Segmentation fault": signal.SIGSEGV,
    "Bus error": signal.SIGBUS,
    "Floating point exception": signal.SIGFPE,
    "Illegal instruction": signal.SIGILL,
}


def _srun(rank: int, host: str, how: str, order: int, ending: bool) -> Death:
    """Returns a death reported by srun; ``ending``: srun had already begun to end the step."""
    number = next((number for name, number in SRUN_SIGNALS.items() if how.startswith(name)), None)
    may_be_srun = number in (signal.SIGKILL, signal.SIGTERM)
    standing = Standing.KILLED if may_be_srun else Standing.REPORTED
    out_of_memory = how.startswith("Out Of Memory")
    if ending and not out_of_memory:
        standing = Standing.SWEPT if may_be_srun else Standing.LATER
    code = re.match(r"Exited with exit code (\d+)", how)
    exit_code = int(code[1]) if code else None
    return Death(rank, None, host, number, exit_code, out_of_memory, standing, order=order)


def _hydra(pid: int, host: str, code: int) -> Death:
    """Returns a death reported by hydra, whose codes below 32 are signals and others exit codes."""
    is_signal = 0 < code < 32
    return Death(pid=pid, host=host, signal=code if is_signal else None, exit_code=None if is_signal else code)


KEPT_BYTES = 65536
CHUNK_BYTES = 16384
PUMP_S = 0.2
"""Seconds after which ``pump`` returns even if there is more, so that its caller can check for signals."""


class Passing:
    """Forwards the launcher's output to the user without blocking, and withholds its reports (``BANNER``).

    Call ``pump`` often, and once more at the end with a longer limit.

    Args:
        source: the launcher's standard output, a pipe.
        target: file descriptor of the user's standard output.
    """

    def __init__(self, source: IO[bytes], target: int) -> None:
        self.source = source.fileno()
        self.target = without_blocking(target)
        self.tail = b""
        self.unshown = b""
        self.in_banner = False
        os.set_blocking(self.source, False)

    def pump(self, most_s: float = PUMP_S) -> None:
        """Forwards what is available, for at most ``most_s`` seconds: ranks may print faster than a terminal shows.

        A terminal may show nothing for hours (Ctrl-S, a pager); what the ranks print then stays in their pipe.
        """
        end = time.monotonic() + most_s
        with contextlib.suppress(BlockingIOError):
            while self.show(end) and (chunk := os.read(self.source, CHUNK_BYTES)):
                self.take(chunk)

    def show(self, end: float) -> bool:
        """Writes what was taken, until ``end`` on the monotonic clock; returns whether everything is written."""
        try:
            while self.unshown and select.select([], [self.target], [], max(0.0, end - time.monotonic()))[1]:
                self.unshown = self.unshown[os.write(self.target, self.unshown) :]
        except BlockingIOError:
            return False
        except OSError:  # the terminal is closed, or the disk full
            self.unshown = b""
        return not self.unshown and time.monotonic() < end

    def take(self, chunk: bytes) -> None:
        """Keeps the end of the output, which may hold a report, and everything before that report for ``show``."""
        self.tail = (self.tail + chunk)[-KEPT_BYTES:]
        if self.in_banner:
            return
        banner = BANNER.search(chunk)
        self.in_banner = banner is not None
        self.unshown += chunk[: banner.start()].removesuffix(b"\n") if banner else chunk

    @property
    def text(self) -> str:
        """The last KEPT_BYTES of the output."""
        return self.tail.decode(errors="replace")

    def close(self) -> None:
        """Closes the descriptor of the user's output."""
        os.close(self.target)


def without_blocking(target: int) -> int:
    """Returns a new descriptor of a terminal or pipe on which writes do not block; of anything else, a duplicate."""
    if not stat.S_ISREG(os.fstat(target).st_mode):  # a file would be written from its beginning
        with contextlib.suppress(OSError):  # a socket, or another user's terminal
            return os.open(f"/proc/self/fd/{target}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    return os.dup(target)
