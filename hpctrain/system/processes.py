"""Processes of this machine: who is alive, who belongs to us, who may not outlive whom, and whom the kernel killed."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
SESSION_BASES = ("PRTE_MCA_prte_local_tmpdir_base", "PRTE_MCA_prte_tmpdir_base")
"""Environment variables that tell Open MPI 5 where to make its session folder on this machine."""
GONE = ""
"""The process has ended, or its number is another's now."""
UNSEEN = "?"
"""The observer could not look (no descriptors, no memory, no permission), which is not evidence of anything."""
TETHER = "HPCTRAIN_TETHER"
"""Environment variable: ranks must die with the process that started them."""


def birth(pid: int) -> float:
    """When a process started, in clock ticks since boot: sets it apart from a later one. 0 if it is gone."""
    try:
        return float(_stat(pid)[19])
    except OSError:
        return 0.0


def look(pid: int, born: float) -> str:
    """The kernel's letter for what a process does (R, S, D, T, Z, ...), GONE, or UNSEEN.

    Args:
        pid: its number.
        born: its ``birth``; 0 if that is not known.
    """
    try:
        fields = _stat(pid)
    except (FileNotFoundError, ProcessLookupError):
        return UNSEEN if _exists(pid) else GONE
    except OSError:
        return UNSEEN
    return fields[0] if born in (0, float(fields[19])) else GONE


def is_alive(pid: int, born: float) -> bool:
    """Whether this very process of this machine lives; a zombie does not, one that cannot be looked at may."""
    return born != 0 and look(pid, born) not in (GONE, "Z", "X")


def machine() -> str:
    """This boot and process namespace: if two processes agree on it, a process number means the same to both."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Has the kernel signal this process when its parent dies. Kept across exec, not inherited by children."""
    _prctl(PR_SET_PDEATHSIG, number)


@contextlib.contextmanager
def own_session(environment: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """The environment for an mpirun whose session folder is this user's alone, and is removed at the end.

    Open MPI 5 names that folder by process number only (/tmp/ompi.<pid>), and does not start if there is one already
    ("The PMIx server's listener thread failed to start"): one that a killed mpirun has left, that another user has
    made, or that belongs to a process of the same number in another container.

    Args:
        environment: that mpirun would have. If it names a folder for sessions, that one is used.
    """
    with contextlib.ExitStack() as stack:
        ours: dict[str, str] = {}
        if not any(name in environment for name in SESSION_BASES):
            with contextlib.suppress(OSError):  # mpirun says it better
                base = next((environment[name] for name in ("TMPDIR", "TEMP", "TMP") if environment.get(name)), "/tmp")
                folder = tempfile.TemporaryDirectory(prefix="hpctrain-mpi-", dir=base, ignore_cleanup_errors=True)
                ours = {SESSION_BASES[0]: stack.enter_context(folder)}
        yield {**environment, **ours}


def adopt_orphans() -> None:
    """Makes this process the parent of descendants whose own parent dies, so that none gets out of sight."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def has_children(pid: int) -> bool:
    """Whether a process has children that live."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return any(child.status() != psutil.STATUS_ZOMBIE for child in psutil.Process(pid).children())
    return False


def end_descendants(patience_s: float) -> list[int]:
    """Waits for all descendants of this process to end, kills those that do not, and reaps them; whom it killed."""
    _, alive = psutil.wait_procs(_descendants(), timeout=patience_s)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=5)
    for process in _descendants():  # born meanwhile, by those just killed
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    _reap()
    return [process.pid for process in alive]


def kernel_killed_for_memory(pid: int) -> bool:
    """Whether the kernel's log says that it killed this process for memory. False if the log cannot be read."""
    try:
        handle = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return False
    needle = f"Killed process {pid} ".encode()
    deadline = time.monotonic() + 1.0
    try:
        while time.monotonic() < deadline:
            if needle in os.read(handle, 8192):
                return True
    except OSError:  # the end of the log, or an entry that was overwritten
        return False
    finally:
        os.close(handle)
    return False


def _stat(pid: int) -> list[str]:
    """Fields of /proc/<pid>/stat behind the name, which may hold anything. Raises OSError."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _exists(pid: int) -> bool:
    """Whether a process of this user has the number; takes no descriptor."""
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def _descendants() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def _reap() -> None:
    """Collects children that ended, adopted ones too."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _prctl(option: int, value: int) -> None:
    """Linux only; elsewhere there is nothing to set."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
