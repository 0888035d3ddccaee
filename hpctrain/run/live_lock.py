"""One live run a folder: a lock that names its holder, works without flock, and is taken over from the dead.

It keeps two live runs apart. That none of them writes once it has lost the lock is the matter of the fence between
attempts (``Attempts.check_fence``). Both use numbers that only go up, each of which exactly one process gets.
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
from hpctrain.system.processes import birth, is_alive, machine

BEAT_S = 10.0
"""Seconds between two signs of life in the lock file."""
MOST_BYTES = 1 << 16
"""Of a lock file."""
STALE_S = 60.0
"""Silence after which a holder whose process cannot be looked at counts as dead."""
TORN_S = 1.0
"""Age from which on a file without a holder's name in it is one that a crash has torn."""


@dataclass(frozen=True)
class Holder:
    """The process that uses a run folder."""

    host: str
    pid: int
    birth: float
    machine: str
    """Boot and process namespace: if two agree, a process number means the same."""
    job: str | None
    """Of a scheduler, if any."""
    restarts: int
    """Which start of that job it is: a later one has a larger number."""
    since: float
    """Unix seconds."""
    cluster: str | None = None
    """Slurm's cluster of the job: another one's knows other jobs by the same numbers."""


def myself() -> Holder:
    """This process."""
    process = (socket.gethostname(), os.getpid(), birth(os.getpid()), machine())
    return Holder(*process, *current_job(), time.time(), os.environ.get("SLURM_CLUSTER_NAME"))


@dataclass(frozen=True)
class Purpose:
    """What a run folder is locked for; locks for different purposes do not exclude each other."""

    name: str
    what: str
    """What to say of a live holder: {run} and {holder} are filled in."""
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
    """A lock of a run folder: ``acquire``, ``beat`` now and then, ``release``; or all three by ``with lock.held()``.

    To take it is to create the next of the files locks/<purpose>/<number>.json, none of which is ever changed or
    removed: of many that want a dead holder's lock one gets it, and the holder of an older ticket has lost it. The file
    <purpose>.lock repeats who holds it, for those that only want to know.
    """

    run_dir: RunDir
    holder: Holder
    purpose: Purpose = TO_RUN
    number: int = 0
    """Of the ticket."""
    beaten: float = 0.0

    @property
    def ids(self) -> UniqueIds:
        """One for each time that the lock was taken."""
        return UniqueIds(self.run_dir.path / "locks" / self.purpose.name, self.run_dir.path)

    @property
    def file(self) -> Path:
        """Names the holder; its time is that of the last sign of life."""
        return self.run_dir.path / f"{self.purpose.name}.lock"

    def acquire(self) -> None:
        """Takes the lock, from a dead holder if need be.

        Raises:
            UserError: a live process has it.
            RunFailed: the folder cannot be used.
        """
        try:
            while not self._take():
                pass  # another one was faster
            self._show()
        except OSError as error:
            what = f"run folder {self.run_dir.path} cannot be locked: {error.strerror or error}"
            raise RunFailed(what, "check that it may be read and written, then run the same command again") from error

    def check(self) -> None:
        """Whether this holder still has the lock.

        Raises:
            Replaced: another one has it.
            OSError: that cannot be seen now.
        """
        newest = self.ids.newest()
        other = read(self.ids.path(newest))
        if newest > self.number or other not in (None, self.holder) or self._is_released(newest):
            who = "another process" if other in (None, self.holder) else _describe(other)
            raise Replaced(f"run folder {self.run_dir.path} has been taken over by {who}")

    def beat(self) -> None:
        """A sign of life, given at most every BEAT_S seconds: call it as often as you like.

        Raises:
            Replaced: another process has the lock. A file server that does not answer does not count as that.
        """
        if time.monotonic() - self.beaten >= BEAT_S:
            self.beaten = time.monotonic()
            with contextlib.suppress(OSError, RunFailed):
                self.check()
                os.utime(self.ids.path(self.number))
                self._show()

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Signs of life from a thread, while the body takes its time; they end if the lock is lost."""
        over = threading.Event()

        def beat() -> None:
            with contextlib.suppress(Replaced):  # reported to whoever asks next
                while not over.wait(BEAT_S):
                    self.beat()

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(BEAT_S)  # a file server may hold it up

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Takes the lock for the body, and keeps it alive. Raises as ``acquire`` does."""
        self.acquire()
        try:
            with self.kept():
                yield
        finally:
            self.release()

    def release(self) -> None:
        """Gives the lock back, unless somebody has taken it over. On a full disk the holder's end does that."""
        with contextlib.suppress(OSError, RunFailed):
            if read(self.file) == self.holder:
                self.file.unlink(missing_ok=True)
            newest = self.ids.newest()
            if read(self.ids.path(newest)) == self.holder:
                create_exclusively(self._released(newest), b"", self.run_dir.path)

    def _take(self) -> bool:
        """Creates the next ticket; whether it is the newest one then."""
        newest = self.ids.newest()
        if (other := self._live_holder(newest)) is not None:
            what = self.purpose.what.format(run=self.run_dir.path, holder=_describe(other))
            raise UserError(what, self.purpose.fix, self.purpose.code)
        self.number, self.beaten = newest + 1, time.monotonic()
        # A process that slept before it had written its name into the ticket may have been taken for dead.
        return self.ids.claim(self.number, _encode(self.holder)) and self.ids.newest() == self.number

    def _live_holder(self, newest: int) -> Holder | None:
        """Who has the lock, by the newest ticket and by the lock file, which is all that older versions write."""
        ticket = self.ids.path(newest)
        for path in (self.file,) if self._is_released(newest) else (self.file, ticket):
            other = _settled(path)
            if other is not None and is_live(other, silence_s(path), self.holder):
                return other
        return None

    def _show(self) -> None:
        """Touches the lock file if it is this holder's, and makes it so if it is not."""
        with contextlib.suppress(FileNotFoundError):
            handle = safe_read.open_plain(self.file)
            try:
                if _decode(os.read(handle, MOST_BYTES)) == self.holder:
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
"""The content of a lock file. Raises ValueError for a value that cannot be that."""


def read(path: Path) -> Holder | None:
    """The holder in a lock file or ticket; none if there is no such file, or it is still empty or damaged."""
    try:
        return _decode(safe_read.read(path, MOST_BYTES))
    except OSError:
        return None


def at_work(run_dir: RunDir) -> Holder | None:
    """Who works on a run folder: a job's supervisor, or ``hpctrain run`` or ``train`` without a job; None if idle."""
    holder = read(run_dir.lock_file)
    return holder if holder is not None and is_live(holder, silence_s(run_dir.lock_file), myself()) else None


def is_live(other: Holder, silence: float, me: Holder) -> bool:
    """Whether the holder may still be at work, seen by ``me``, ``silence`` seconds after its last sign of life."""
    if other.machine == me.machine:
        return is_alive(other.pid, other.birth)
    same_job = other.job is not None and (other.job, other.cluster) == (me.job, me.cluster)
    if same_job and other.restarts < me.restarts:
        return False  # schedulers restart a job only when its former processes are gone
    return silence < STALE_S


def silence_s(path: Path) -> float:
    """Age of the lock's last sign of life, by the clock of the file system; by this host's, if that is read-only."""
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
    """The holder in a file that may be being written just now, or was torn by a crash in the middle of it."""
    while (found := read(path)) is None and path.exists() and silence_s(path) < TORN_S:
        time.sleep(0.05)
    return found


def _encode(holder: Holder) -> bytes:
    return json.dumps(asdict(holder)).encode()


def _decode(content: bytes) -> Holder | None:
    try:
        return lock_of(safe_read.parse_json(content))
    except ValueError:
        return None


def _describe(other: Holder) -> str:
    job = f", job {other.job}" if other.job else ""
    return f"process {other.pid} on {other.host}{job}, since {time.strftime('%F %T', time.localtime(other.since))}"


TICKET = re.compile(r"(\d+)\.json")


@dataclass(frozen=True)
class UniqueIds:
    """Numbers that only go up: each is a file that exactly one process creates, and that never changes or goes away."""

    folder: Path
    run: Path
    """The run folder, below which no link is followed."""

    def path(self, number: int, what: str = "") -> Path:
        """The file that stands for a number, or one that says more about it."""
        return self.folder / (f"{number}.{what}.json" if what else f"{number}.json")

    def taken(self) -> list[int]:
        """All numbers that are taken, ascending."""
        # An NFS client may list a folder as it was up to a minute ago. Changing the folder makes it ask the server.
        with contextlib.suppress(OSError):
            os.utime(self.folder)
        try:
            return sorted(int(match[1]) for match in map(TICKET.fullmatch, os.listdir(self.folder)) if match)
        except FileNotFoundError:
            return []

    def newest(self) -> int:
        """The highest number that is taken, 0 if none is."""
        return max(self.taken(), default=0)

    def make_folder(self) -> None:
        """Makes the folder. Raises RunFailed if it cannot be made."""
        with writing(self.folder):
            make_folder(self.folder, self.run)

    def claim(self, number: int, content: bytes) -> bool:
        """Takes this number; False if another process has it. Raises RunFailed if it cannot be written."""
        self.make_folder()
        return create_exclusively(self.path(number), content, self.run)

    def take(self, content: bytes, above: int = 0) -> int:
        """Takes the next number, higher than ``above`` and than all that are taken. Raises RunFailed, see ``claim``."""
        with writing(self.folder):
            number = max(above, self.newest()) + 1
        while not self.claim(number, content):
            number += 1
        return number
