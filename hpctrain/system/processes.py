"""Processes of this machine: who is alive, who belongs to us, who may not outlive whom, and whom the kernel killed."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import signal
import socket
import struct
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import psutil

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
PF_EXITING = 0x4
"""linux/sched.h: a flag in /proc/PID/stat."""
PIDFD_INFO, PIDFD_INFO_EXIT = struct.Struct("Q52xi"), 1 << 3
PIDFD_GET_INFO = 3 << 30 | PIDFD_INFO.size << 16 | 0xFF << 8 | 11
"""linux/pidfd.h: struct pidfd_info in its first version, of which we read the mask and the exit status."""
SESSION_BASES = ("PRTE_MCA_prte_local_tmpdir_base", "PRTE_MCA_prte_tmpdir_base")
"""Environment variables that tell Open MPI 5 where to make its session folder on this machine."""
MPI_FOLDER = "hpctrain-openmpi-"
"""Begins names of folders that MPI gets from us. The process that made one holds its lock."""
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


def is_ending(pid: int) -> bool:
    """Whether the kernel has begun to end a process, which may still be one for a while."""
    with contextlib.suppress(OSError):
        return bool(int(_stat(pid)[6]) & PF_EXITING)
    return False


def exit_code_of(pid: int, life: int) -> int | None:
    """How any process of this user ended: its exit code, or minus its signal; None if that is not known.

    Args:
        pid: its number.
        life: a descriptor from ``os.pidfd_open``, which has become readable.
    """
    with contextlib.suppress(OSError):
        fields = _stat(pid)
        if fields[0] in ("Z", "X"):
            return os.waitstatus_to_exitcode(int(fields[49]))
    with contextlib.suppress(OSError):  # it is reaped already, and Linux is older than 6.15
        info = fcntl.ioctl(life, PIDFD_GET_INFO, PIDFD_INFO.pack(PIDFD_INFO_EXIT, 0))
        known, status = PIDFD_INFO.unpack(info)
        return os.waitstatus_to_exitcode(status) if known & PIDFD_INFO_EXIT else None
    return None


def machine() -> str:
    """This boot and process namespace: if two processes agree on it, a process number means the same to both."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()


def threads_sleep(name: str) -> bool:
    """Whether all threads of this process that bear a name, of up to 15 letters, wait for something."""
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has ended
            _, _, said = Path(f"/proc/self/task/{task}/stat").read_text(errors="replace").partition(" (")
            known, _, rest = said.rpartition(") ")
            if known == name and rest[0] != "S":
                return False
    return True


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
    if any(name in environment for name in SESSION_BASES):
        yield dict(environment)
        return
    base = next((environment[name] for name in ("TMPDIR", "TEMP", "TMP") if environment.get(name)), "/tmp")
    with own_folder(base) as folder:
        yield {**environment, **({SESSION_BASES[0]: folder} if folder else {})}


@contextlib.contextmanager
def own_folder(base: str) -> Iterator[str]:
    """A new folder for MPI that only this user may enter, removed at the end; empty text if ``base`` cannot hold one.

    Those of processes that were killed before they could remove theirs go first: no process holds their locks.
    """
    for old in Path(base).glob(f"{MPI_FOLDER}*"):
        with contextlib.suppress(OSError), _held(old):
            if old.stat().st_uid == os.geteuid():
                shutil.rmtree(old, ignore_errors=True)
    with contextlib.ExitStack() as stack:
        folder = ""
        with contextlib.suppress(OSError):
            folder = stack.enter_context(_new_folder(base))
        yield folder


@contextlib.contextmanager
def _new_folder(base: str) -> Iterator[str]:
    """See ``own_folder``. Raises OSError."""
    new = Path(tempfile.mkdtemp(prefix=f".{MPI_FOLDER}", dir=base))
    with _held(new):
        folder = new.rename(new.with_name(new.name[1:]))  # it is locked before anybody looks for it
        try:
            yield str(folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Holds a folder's lock. Raises OSError: another process does, or it is no folder."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(opened)


def adopt_orphans() -> None:
    """Makes this process the parent of descendants whose own parent dies, so that none gets out of sight."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def has_children(pid: int) -> bool:
    """Whether a process has children that live."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return any(child.status() != psutil.STATUS_ZOMBIE for child in psutil.Process(pid).children())
    return False


def end_descendants(patience_s: float, spared: Collection[int] = (), alone: int = 0) -> list[int]:
    """Waits for all descendants of this process to end, kills those that do not, and reaps them; whom it killed.

    Args:
        patience_s: how long they may take.
        spared: processes that are left alone, with their descendants.
        alone: the one of them whose descendants are not.
    """
    _, alive = psutil.wait_procs(_descendants(spared, alone), timeout=patience_s)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=5)
    for process in _descendants(spared, alone):  # born meanwhile, by those just killed
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
    """Fields of /proc/<pid>/stat behind the name, which may be cut in mid-character. Raises OSError."""
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()


def _exists(pid: int) -> bool:
    """Whether a process of this user has the number; takes no descriptor."""
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def descendants() -> list[int]:
    """Numbers of the processes that this one has started, or whose parents it has."""
    return [process.pid for process in _descendants()]


def _descendants(spared: Collection[int] = (), alone: int = 0) -> list[psutil.Process]:
    kept, found = set(spared), []
    for process in psutil.Process().children(recursive=True):  # parents come before their children
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.pid in kept or process.ppid() in kept - {alone}:
                kept.add(process.pid)
            else:
                found.append(process)
    return found


def _reap() -> None:
    """Collects children that ended, adopted ones too."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _prctl(option: int, value: int) -> None:
    """Linux only; elsewhere there is nothing to set."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
