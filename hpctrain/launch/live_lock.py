"""One live run a folder: a lock that names its holder, works without flock, and is taken over from the dead."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpctrain.errors import UserError
from hpctrain.launch.processes import birth, is_alive, machine
from hpctrain.run_dir import RunDir, create_exclusively
from hpctrain.system import safe_read
from hpctrain.system.json_shape import is_count, is_time, typed

BEAT_S = 10.0
"""Seconds between two signs of life in the lock file."""
MOST_BYTES = 1 << 16
"""Of a lock file."""
STALE_S = 60.0
"""Silence after which a holder whose process cannot be looked at counts as dead."""


@dataclass(frozen=True)
class Holder:
    """The process that uses a run folder."""

    host: str
    pid: int
    birth: float
    machine: str
    """Boot and process namespace: where two agree, a process number means the same."""
    job: str | None
    """Slurm job, if any."""
    restarts: int
    """How often Slurm had restarted that job."""
    since: float
    """Unix seconds."""
    cluster: str | None = None
    """Slurm's cluster of the job: another one's knows other jobs by the same numbers."""


def myself() -> Holder:
    """This process."""
    job, restarts = os.environ.get("SLURM_JOB_ID"), int(os.environ.get("SLURM_RESTART_COUNT") or 0)
    process = (socket.gethostname(), os.getpid(), birth(os.getpid()), machine())
    return Holder(*process, job, restarts, time.time(), os.environ.get("SLURM_CLUSTER_NAME"))


@dataclass
class LiveLock:
    """The lock of a run folder. ``acquire``, ``beat`` now and then, ``release``."""

    run_dir: RunDir
    holder: Holder
    beaten: float = 0.0

    def acquire(self) -> None:
        """Takes the lock, from a dead holder if need be.

        Raises:
            UserError: a live run uses the folder.
        """
        content = json.dumps(asdict(self.holder)).encode()
        path = self.run_dir.lock_file
        while not create_exclusively(path, content):
            other = read(path)
            if other is not None and is_live(other, silence_s(path), self.holder):
                raise UserError(
                    f"run folder {self.run_dir.path} is in use by another live run: {_describe(other)}",
                    "wait for it, stop it (touch STOP in the run folder), or choose another name or run_dir",
                )
            _take_away(path, other)
        self.beaten = time.monotonic()

    def beat(self) -> None:
        """A sign of life, written at most every BEAT_S seconds: call it as often as you like."""
        if time.monotonic() - self.beaten >= BEAT_S:
            self.beaten = time.monotonic()
            with contextlib.suppress(OSError):
                os.utime(self.run_dir.lock_file)

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Signs of life from a thread, while the body takes its time."""
        over = threading.Event()

        def beat() -> None:
            while not over.wait(BEAT_S):
                self.beat()

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def release(self) -> None:
        """Gives the lock back, unless somebody has taken it over."""
        if read(self.run_dir.lock_file) == self.holder:
            self.run_dir.lock_file.unlink(missing_ok=True)


lock_of = typed(
    {
        **{"host": str, "pid": is_count, "birth": float, "machine": str, "job": (str, None)},
        **{"restarts": is_count, "since": is_time, "cluster": (str, None)},
    }
)
"""The content of a lock file; None for a value that cannot be that."""


def read(path: Path) -> Holder | None:
    """The holder of a lock file; none where there is no lock, or it is still empty or damaged."""
    try:
        saved: dict[str, Any] | None = lock_of(safe_read.read_json(path, MOST_BYTES))
        return None if saved is None else Holder(**saved)
    except (OSError, ValueError, TypeError):
        return None


def at_work(run_dir: RunDir) -> Holder | None:
    """Who works on a run folder: a job's supervisor, or ``hpctrain run`` or ``train`` without a job; none if nobody."""
    holder = read(run_dir.lock_file)
    return holder if holder is not None and is_live(holder, silence_s(run_dir.lock_file), myself()) else None


def is_live(other: Holder, silence: float, me: Holder) -> bool:
    """Whether the holder may still be at work, seen by ``me``, ``silence`` seconds after its last sign of life."""
    if other.machine == me.machine:
        return is_alive(other.pid, other.birth)
    same_job = other.job is not None and (other.job, other.cluster) == (me.job, me.cluster)
    if same_job and other.restarts < me.restarts:
        return False  # Slurm restarts a job only when its former processes are gone
    return silence < STALE_S


def silence_s(path: Path) -> float:
    """Age of the lock's last sign of life, by the clock of the file system; by this host's, where that is read-only."""
    probe = path.with_name(f".clock.{socket.gethostname()}.{os.getpid()}")
    try:
        probe.touch()
        now = probe.stat().st_mtime
    except OSError:
        now = time.time()
    try:
        return now - path.stat().st_mtime
    except OSError:
        return 0.0
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()


def _take_away(path: Path, dead: Holder | None) -> None:
    """Removes the lock of a dead holder, but not the one of another process that was faster."""
    if dead is None:  # being written just now, or torn by a crash in the middle of it
        time.sleep(0.05)
        if read(path) is not None or silence_s(path) < 1.0:
            return
    aside = path.with_name(f".stale.{socket.gethostname()}.{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        os.rename(path, aside)
        if read(aside) != dead:
            with contextlib.suppress(OSError):
                os.link(aside, path)
        aside.unlink(missing_ok=True)


def _describe(other: Holder) -> str:
    job = f", Slurm job {other.job}" if other.job else ""
    return f"process {other.pid} on {other.host}{job}, since {time.strftime('%F %T', time.localtime(other.since))}"
