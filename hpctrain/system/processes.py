"""Processes of this machine: liveness, exit codes, descendants, parent-death signals and OOM kills."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import time
import zlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import psutil

from hpctrain.system import cgroups
from hpctrain.system.files import take_lock

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
PF_EXITING = 0x4
"""linux/sched.h: a flag in /proc/PID/stat."""
PIDFD_INFO, PIDFD_INFO_EXIT = struct.Struct("Q52xi"), 1 << 3
PIDFD_GET_INFO = 3 << 30 | PIDFD_INFO.size << 16 | 0xFF << 8 | 11
"""linux/pidfd.h: the first version of struct pidfd_info, of which the mask and the exit status are read."""
SESSION_BASES = ("PRTE_MCA_prte_local_tmpdir_base", "PRTE_MCA_prte_tmpdir_base")
"""Environment variables for the parent of Open MPI 5's session folder on this machine."""
MPI_FOLDER = "hpctrain-openmpi-"
"""Name prefix of folders made for MPI. The process that made one holds its lock."""
GONE = ""
"""State: the process has ended, or its PID has been reused."""
UNSEEN = "?"
"""State: the process could not be observed (no descriptors, memory or permission), so its state is unknown."""
KILLED_S = 5.0
KERNEL_LOG = "/dev/kmsg"
LOG_DRIFT = 1e-3
"""Relative error allowed to the clock of the kernel's log, which no time server corrects."""
TETHER = "HPCTRAIN_TETHER"
"""Environment variable that makes ranks die with the process that started them."""


def birth(pid: int) -> float:
    """Start time of a process in clock ticks since boot, which distinguishes reused PIDs. 0 if it is gone."""
    try:
        return float(_stat(pid)[19])
    except OSError:
        return 0.0


def look(pid: int, born: float) -> str:
    """Returns the kernel's letter for a process's state (R, S, D, T, Z, ...), GONE, or UNSEEN.

    Args:
        pid: PID of the process.
        born: its ``birth``; 0 if unknown.
    """
    try:
        fields = _stat(pid)
    except (FileNotFoundError, ProcessLookupError):
        return UNSEEN if _exists(pid) else GONE
    except OSError:
        return UNSEEN
    return fields[0] if born in (0, float(fields[19])) else GONE


def is_alive(pid: int, born: float) -> bool:
    """Whether this process is alive; a zombie is not, one that cannot be observed may be."""
    return born != 0 and look(pid, born) not in (GONE, "Z", "X")


def is_hidden(pid: int) -> bool:
    """Whether the PID is of another user's process that /proc does not show here (its option ``hidepid``)."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return not os.path.exists(f"/proc/{pid}")
    except OSError:
        pass
    return False


def is_ending(pid: int) -> bool:
    """Whether a process is exiting or has been sent SIGKILL; it may continue to exist for a while."""
    with contextlib.suppress(OSError):
        fields = _stat(pid)
        return bool(int(fields[6]) & PF_EXITING or int(fields[28]) >> signal.SIGKILL - 1 & 1)
    return False


def exit_code_of(pid: int, life: int) -> int | None:
    """Returns the exit code of any process of this user, or minus its signal; None if unknown.

    Args:
        pid: PID of the process.
        life: its descriptor from ``os.pidfd_open``, which has become readable.
    """
    with contextlib.suppress(OSError):
        fields = _stat(pid)
        if fields[0] in ("Z", "X"):
            return os.waitstatus_to_exitcode(int(fields[49]))
    with contextlib.suppress(OSError):  # already reaped, and Linux before 6.15
        info = fcntl.ioctl(life, PIDFD_GET_INFO, PIDFD_INFO.pack(PIDFD_INFO_EXIT, 0))
        known, status = PIDFD_INFO.unpack(info)
        return os.waitstatus_to_exitcode(status) if known & PIDFD_INFO_EXIT else None
    return None


def machine() -> str:
    """Identifies this boot and PID namespace: PIDs mean the same to processes that agree on it."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()


def threads_sleep(name: str) -> bool:
    """Whether all threads of this process with a name (up to 15 characters) are sleeping."""
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # the thread has ended
            _, _, said = Path(f"/proc/self/task/{task}/stat").read_text(errors="replace").partition(" (")
            known, _, rest = said.rpartition(") ")
            if known == name and rest[0] != "S":
                return False
    return True


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Makes the kernel signal this process when its parent dies. Kept across exec, not inherited by children."""
    _prctl(PR_SET_PDEATHSIG, number)


@contextlib.contextmanager
def own_session(environment: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Context manager that yields an environment for mpirun with a private session folder, removed at the end.

    Open MPI 5 names that folder by PID only (/tmp/ompi.<pid>) and does not start if it already exists ("The PMIx
    server's listener thread failed to start"): left by a killed mpirun, made by another user, or belonging to a process
    with the same PID in another container.

    Args:
        environment: mpirun's environment. If it already names a folder for sessions, it is used unchanged.
    """
    if any(name in environment for name in SESSION_BASES):
        yield dict(environment)
        return
    base = next((environment[name] for name in ("TMPDIR", "TEMP", "TMP") if environment.get(name)), "/tmp")
    with own_folder(base) as folder:
        yield {**environment, **({SESSION_BASES[0]: folder} if folder else {})}


@contextlib.contextmanager
def own_folder(base: str) -> Iterator[str]:
    """Context manager that yields a new private folder for MPI, removed at the end; "" if it cannot be created.

    Folders left by killed processes of this host are removed first: no process holds their locks. Other hosts may share
    the folder ``base``, on a file system whose locks they do not share.
    """
    for old in Path(base).glob(f"{own_prefix()}*"):
        with contextlib.suppress(OSError), _held(old) as is_locked:
            if is_locked and old.stat().st_uid == os.geteuid():
                shutil.rmtree(old, ignore_errors=True)
    with contextlib.ExitStack() as stack:
        folder = ""
        with contextlib.suppress(OSError):
            folder = stack.enter_context(_new_folder(base))
        yield folder


def own_prefix() -> str:
    """Returns how names of folders begin that this host's processes make for MPI; short, as sockets have paths."""
    return f"{MPI_FOLDER}{zlib.crc32(socket.gethostname().encode()):08x}-"


@contextlib.contextmanager
def _new_folder(base: str) -> Iterator[str]:
    """See ``own_folder``. Raises OSError."""
    new = Path(tempfile.mkdtemp(prefix=f".{own_prefix()}", dir=base))
    with _held(new):
        folder = new.rename(new.with_name(new.name[1:]))  # locked before others can find it
        try:
            yield str(folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[bool]:
    """Holds a folder's lock; yields whether there are locks. Raises OSError if another process holds it."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        is_locked = take_lock(opened)
        if is_locked is False:
            raise BlockingIOError(f"another process holds {folder}")
        yield is_locked is True
    finally:
        os.close(opened)


def adopt_orphans() -> None:
    """Makes this process the parent of orphaned descendants, so that none is lost."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def has_children(pid: int) -> bool:
    """Whether a process has live children."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return any(child.status() != psutil.STATUS_ZOMBIE for child in psutil.Process(pid).children())
    return False


def end_descendants(grace_s: float, spared: Collection[int] = (), alone: int = 0) -> list[int]:
    """Waits for all descendants of this process to end, kills the rest, and reaps them. Returns the killed PIDs.

    Args:
        grace_s: seconds to wait before killing.
        spared: PIDs to spare, with their descendants.
        alone: the PID in ``spared`` whose descendants are not spared.
    """
    _, alive = psutil.wait_procs(_descendants(spared, alone), timeout=grace_s)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=KILLED_S)
    for process in _descendants(spared, alone):  # started meanwhile by those just killed
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    _reap()
    return [process.pid for process in alive]


def end_process(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """Terminates a child process and waits for it; kills it after ``grace_s``."""
    process.terminate()
    try:
        process.wait(grace_s)
    except subprocess.TimeoutExpired:
        kill(process)


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kills a child process, and waits for its end up to KILLED_S: one that waits for a file server does not end."""
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(KILLED_S)


def ran_out_of_memory(pid: int, born: float, kills_before: int | None) -> bool:
    """Whether the kernel's log names the process, or our control group, which it shares, counts another OOM kill.

    Args:
        pid: PID of the process.
        born: its ``birth``, or an earlier one.
        kills_before: the control group's count at its start.
    """
    if kernel_killed_for_memory(pid, born):
        return True
    now = cgroups.oom_kills()
    return kills_before is not None and now is not None and now > kills_before


def kernel_killed_for_memory(pid: int, born: float) -> bool:
    """Whether the kernel log reports an OOM kill of this process, not of an earlier one with its PID.

    False if the log cannot be read.
    """
    try:
        handle = os.open(KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return False
    needle = f"Killed process {pid} ".encode()
    asleep_s = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()  # the log's clock stands still meanwhile
    since_us = 1e6 * (born / os.sysconf("SC_CLK_TCK") - asleep_s) * (1 - LOG_DRIFT)
    deadline = time.monotonic() + 1.0
    try:
        while time.monotonic() < deadline and (record := os.read(handle, 8192)):
            # "priority,number,microseconds,flags;text"
            if needle in record and int(record.split(b",", 3)[2]) >= since_us:
                return True
    except OSError:  # end of the log, or an overwritten entry
        return False
    finally:
        os.close(handle)
    return False


def _stat(pid: int) -> list[str]:
    """Fields of /proc/<pid>/stat after the name, which may be cut in mid-character. Raises OSError."""
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()


def _exists(pid: int) -> bool:
    """Whether a process of this user has the PID; needs no descriptor."""
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def descendants() -> list[int]:
    """PIDs of this process's descendants."""
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
    """Reaps ended children, including adopted ones."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _prctl(option: int, value: int) -> None:
    """Calls prctl; does nothing on systems other than Linux."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
