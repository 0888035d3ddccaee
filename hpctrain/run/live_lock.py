"""A lock that admits one live run per folder. It names its holder, needs no flock, and can be taken from a dead holder.

A run that has lost the lock is kept from writing by the fence between attempts (``Attempts.check_fence``). Lock and
fence both use increasing numbers, each of which exactly one process gets (``UniqueIds``).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from hpctrain.errors import Code, Replaced, RunFailed, UserError
from hpctrain.run.folder import RunDir
from hpctrain.run.rank_environment import current_job
from hpctrain.system import safe_read
from hpctrain.system.files import create_exclusively, make_folder, write_atomically, writing
from hpctrain.system.json_shape import is_time, maker, sound
from hpctrain.system.processes import birth, is_alive, is_hidden, machine
from hpctrain.system.retry import retry_files

BEAT_S = 10.0
"""Seconds between two signs of life in the lock file."""
MOST_BYTES = 1 << 16
"""Maximum size of a lock file."""
STALE_S = 60.0
"""Seconds of silence after which a holder counts as dead if its process cannot be checked from here."""
TORN_S = 1.0
"""Age in seconds above which a lock file without a valid holder counts as torn by a crash."""


@dataclass(frozen=True)
class Holder:
    """The process that uses a run folder."""

    host: str
    pid: int
    birth: float
    machine: str
    """Boot and process namespace: process numbers are comparable if it is the same."""
    job: str | None
    """The scheduler's job, if any."""
    restarts: int
    """Which start of that job it is; later starts have larger numbers."""
    since: float
    """Unix seconds."""
    cluster: str | None = None
    """Slurm cluster of the job; job numbers are unique within a cluster only."""


def myself() -> Holder:
    """Returns this process as a holder."""
    process = (socket.gethostname(), os.getpid(), birth(os.getpid()), machine())
    return Holder(*process, *current_job(), time.time(), os.environ.get("SLURM_CLUSTER_NAME"))


@dataclass(frozen=True)
class Purpose:
    """What a run folder is locked for; locks for different purposes do not exclude each other."""

    name: str
    what: str
    """Message if a live process holds the lock; {run} and {holder} are filled in."""
    fix: str
    code: Code = Code.USER_ERROR


TO_RUN = Purpose(
    "run",
    "run folder {run} is in use by another live run: {holder}",
    "wait for it, stop it (touch STOP in the run folder), or choose another name or run_dir",
    Code.IN_USE,
)
TO_SUBMIT = Purpose(
    "submit",
    "run folder {run} is being submitted at this moment: {holder}",
    "wait until that has ended; hpctrain status then shows its job",
)


@dataclass
class LiveLock:
    """A lock of a run folder. Call ``acquire``, ``beat`` regularly, and ``release``; or use ``with lock.held()``.

    Taking the lock means creating the next file locks/<purpose>/<number>.json (a ticket); tickets are never changed or
    removed. So of several processes that want a dead holder's lock exactly one gets it, and whoever has an older ticket
    has lost it. The file <purpose>.lock names the holder for readers.
    """

    run_dir: RunDir
    holder: Holder
    purpose: Purpose = TO_RUN
    number: int = 0
    """Number of this holder's ticket."""
    beaten: float = 0.0

    @property
    def ids(self) -> UniqueIds:
        """Allocates the tickets' numbers."""
        return UniqueIds(self.run_dir.path / "locks" / self.purpose.name, self.run_dir.path)

    @property
    def file(self) -> Path:
        """File that names the holder; its modification time is that of the last sign of life."""
        return self.run_dir.path / f"{self.purpose.name}.lock"

    def acquire(self) -> None:
        """Takes the lock, from a dead holder if there is one.

        Raises:
            UserError: a live process holds it.
            RunFailed: the folder cannot be used.
        """
        try:
            while not retry_files(self._take):
                pass  # another process was faster
            retry_files(self._show)
        except OSError as error:
            what = f"run folder {self.run_dir.path} cannot be locked: {error.strerror or error}"
            raise RunFailed(what, "check that it may be read and written, then run the same command again") from error

    def check(self) -> None:
        """Checks that this holder still has the lock.

        Raises:
            Replaced: another process has it.
            OSError: the folder cannot be read at the moment.
        """
        newest = self.ids.newest()
        other = read(self.ids.path(newest))
        if newest > self.number or other not in (None, self.holder) or self._is_released(newest):
            who = "another process" if other in (None, self.holder) else _describe(other)
            raise Replaced(f"run folder {self.run_dir.path} has been taken over by {who}")

    def beat(self) -> None:
        """Gives a sign of life, at most every BEAT_S seconds; calls in between do nothing.

        Raises:
            Replaced: another process has the lock. Errors of the file server are ignored.
        """
        if time.monotonic() - self.beaten >= BEAT_S:
            self.beaten = time.monotonic()
            with contextlib.suppress(OSError, RunFailed):
                self.check()
                os.utime(self.ids.path(self.number))
                self._show()

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Gives signs of life from a thread while the body runs; stops if the lock is lost."""
        over = threading.Event()

        def beat() -> None:
            with contextlib.suppress(Replaced):  # the next ``check`` or ``beat`` raises it
                while not over.wait(BEAT_S):
                    self.beat()

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(BEAT_S)  # with a timeout, since a file server may block the thread

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Holds the lock while the body runs. Raises as ``acquire`` does."""
        self.acquire()
        try:
            with self.kept():
                yield
        finally:
            self.release()

    def release(self) -> None:
        """Gives the lock back, unless another process has taken it over.

        If that cannot be recorded (full disk), the lock becomes free when this process ends.
        """
        with contextlib.suppress(OSError, RunFailed):
            if read(self.file) == self.holder:
                self.file.unlink(missing_ok=True)
            newest = self.ids.newest()
            if read(self.ids.path(newest)) == self.holder:
                create_exclusively(self._released(newest), b"", self.run_dir.path)

    def _take(self) -> bool:
        """Creates the next ticket; returns whether it is then the newest one."""
        newest = self.ids.newest()
        if (other := self._live_holder(newest)) is not None:
            what = self.purpose.what.format(run=self.run_dir.path, holder=_describe(other))
            raise UserError(what, self.purpose.fix, self.purpose.code)
        self.number, self.beaten = newest + 1, time.monotonic()
        # If this process slept before writing its name into the ticket, another one may have taken it for dead.
        return self.ids.claim(self.number, _encode(self.holder)) and self.ids.newest() == self.number

    def _live_holder(self, newest: int) -> Holder | None:
        """Returns the live holder by the newest ticket and the lock file, or None."""
        ticket = self.ids.path(newest)
        for path in (self.file,) if self._is_released(newest) else (self.file, ticket):
            other = _settled(path)
            if other not in (None, self.holder) and is_live(other, silence_s(path), self.holder):
                return other
        return None

    def _show(self) -> None:
        """Touches the lock file if it names this holder; else rewrites it."""
        with contextlib.suppress(FileNotFoundError):
            handle = safe_read.open_plain(self.file)
            try:
                if safe_read.parse_as(lock_of, os.read(handle, MOST_BYTES)) == self.holder:
                    os.utime(handle)
                    return
            finally:
                os.close(handle)
        write_atomically(self.file, _encode(self.holder), self.run_dir.path)

    def _released(self, number: int) -> Path:
        return self.ids.path(number, "released")

    def _is_released(self, number: int) -> bool:
        return self._released(number).exists()


lock_of = maker(Holder, since=sound(is_time))
"""Parses the content of a lock file. Raises ValueError if it is not valid."""


def read(path: Path) -> Holder | None:
    """Reads the holder from a lock file or ticket; None if it is missing, empty or damaged."""
    try:
        return safe_read.parse_as(lock_of, safe_read.read(path, MOST_BYTES))
    except OSError:
        return None


def at_work(run_dir: RunDir) -> Holder | None:
    """Returns the live process that uses a run folder (supervisor, ``hpctrain run`` or ``train``); None if idle."""
    holder = read(run_dir.lock_file)
    return holder if holder is not None and is_live(holder, silence_s(run_dir.lock_file), myself()) else None


def is_live(other: Holder, silence: float, me: Holder) -> bool:
    """Whether a holder may still be alive, as seen by ``me``, ``silence`` seconds after its last sign of life."""
    if other.machine == me.machine:
        return is_alive(other.pid, other.birth) or (is_hidden(other.pid) and silence < STALE_S)
    same_job = other.job is not None and (other.job, other.cluster) == (me.job, me.cluster)
    if same_job and other.restarts < me.restarts:
        return False  # schedulers restart a job only after its earlier processes have ended
    return silence < STALE_S


def silence_s(path: Path) -> float:
    """Returns seconds since the last sign of life, by the file system's clock; by this host's if it is read-only."""
    try:
        with tempfile.TemporaryFile(dir=path.parent) as probe:
            os.utime(probe.fileno())
            now = os.fstat(probe.fileno()).st_mtime
    except OSError:
        now = time.time()
    try:
        return now - path.stat().st_mtime
    except OSError:
        return 0.0


def _settled(path: Path) -> Holder | None:
    """Reads the holder from a file; waits up to TORN_S if the file seems to be in the middle of being written."""
    while (found := read(path)) is None and path.exists() and silence_s(path) < TORN_S:
        time.sleep(0.05)
    return found


def _encode(holder: Holder) -> bytes:
    return json.dumps(asdict(holder)).encode()


def _describe(other: Holder) -> str:
    job = f", job {other.job}" if other.job else ""
    return f"process {other.pid} on {other.host}{job}, since {time.strftime('%F %T', time.localtime(other.since))}"


TICKET = re.compile(r"(\d+)\.json")


@dataclass(frozen=True)
class UniqueIds:
    """Increasing numbers, each a file that exactly one process creates and that is never changed or removed."""

    folder: Path
    run: Path
    """The run folder; symbolic links below it are not followed."""

    def path(self, number: int, what: str = "") -> Path:
        """Returns a number's file, or with ``what`` the path of an additional file about it."""
        return self.folder / (f"{number}.{what}.json" if what else f"{number}.json")

    def taken(self) -> list[int]:
        """Returns all taken numbers, ascending."""
        # An NFS client may list a folder as it was a minute ago. Changing the folder makes it ask the server.
        with contextlib.suppress(OSError):
            os.utime(self.folder)
        try:
            return sorted(int(match[1]) for match in map(TICKET.fullmatch, os.listdir(self.folder)) if match)
        except FileNotFoundError:
            return []

    def newest(self) -> int:
        """Returns the highest taken number, 0 if none is."""
        return max(self.taken(), default=0)

    def make_folder(self) -> None:
        """Makes the folder. Raises RunFailed if it cannot be made."""
        with writing(self.folder):
            make_folder(self.folder, self.run)

    def claim(self, number: int, content: bytes) -> bool:
        """Takes this number; False if another process has it. Raises RunFailed if it cannot be written."""
        self.make_folder()
        return create_exclusively(self.path(number), content, self.run)

    def take(self, content: bytes) -> int:
        """Takes and returns the next number above all taken ones. Raises RunFailed; see ``claim``."""
        with writing(self.folder):
            number = self.newest() + 1
        while not self.claim(number, content):
            number += 1
        return number
