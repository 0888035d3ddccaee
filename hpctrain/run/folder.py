"""The run folder: where things are, who the run is, and its events. Everybody finds them through here."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import socket
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.errors import RunFailed, UserError
from hpctrain.run import events
from hpctrain.run.rank_environment import ATTEMPT

if TYPE_CHECKING:
    from hpctrain.config.sections import Config

MUTEX_STALE_S = 5.0
"""Time after which one and the same lock around an update of run.json was left by a dead process: updates take ms."""


@dataclass(frozen=True)
class RunDir:
    """One run folder. Making the object touches nothing; ``create`` makes the folders."""

    path: Path

    @classmethod
    def for_config(cls, config: Config) -> RunDir:
        """The folder a run file names, or runs/<name> below the working directory; absolute."""
        return cls(Path(config.run_dir or Path("runs") / config.name).expanduser().absolute())

    @property
    def run_yaml(self) -> Path:
        """The resolved run file."""
        return self.path / "run.yaml"

    @property
    def run_json(self) -> Path:
        """Identity and attempts."""
        return self.path / "run.json"

    @property
    def lock_file(self) -> Path:
        """Names the live run that uses the folder."""
        return self.path / "run.lock"

    @property
    def events(self) -> Path:
        """Events, appended by rank 0."""
        return self.path / "events.jsonl"

    @property
    def monitor(self) -> Path:
        """The monitor's folder."""
        return self.path / "monitor"

    @property
    def monitor_events(self) -> Path:
        """Events, appended by the first node agent."""
        return self.monitor / "events.jsonl"

    @property
    def ranks(self) -> Path:
        """Last words."""
        return self.path / "ranks"

    @property
    def checkpoints(self) -> Path:
        """Checkpoints."""
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        """Output of ranks and launchers."""
        return self.path / "logs"

    @property
    def stop_file(self) -> Path:
        """Anyone may create it: checkpoint and stop."""
        return self.path / "STOP"

    def words(self, attempt: int) -> Path:
        """The merged last words of an attempt."""
        return self.ranks / f"{attempt}.json"

    def log(self, rank: int | str, attempt: int) -> Path:
        """The log of one rank, or of the launcher, in an attempt: logs/<job>-<attempt>-<rank>.out."""
        return self.logs / f"{os.environ.get('SLURM_JOB_ID', 'local')}-{attempt}-{rank}.out"

    def create(self) -> None:
        """Makes the folder and those in it.

        Raises:
            UserError: it cannot be made or written.
        """
        try:
            for folder in (self.path, self.monitor, self.ranks, self.checkpoints, self.logs):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"the run folder {self.path} cannot be made: {error.strerror}",
                "set run_dir to a folder that you may write and that has free space",
            ) from error

    # identity and attempts

    def info(self) -> dict[str, Any]:
        """Content of run.json; empty where there is none yet.

        Raises:
            UserError: it is damaged.
        """
        try:
            info = json.loads(self.run_json.read_bytes())
            if not _is_info(info):
                raise ValueError("its fields are not of the types that they should be")
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise UserError(f"{self.run_json} is damaged: {error}", "remove it: attempts then count anew") from error
        return info

    def update(self, **fields: Any) -> dict[str, Any]:
        """Sets fields of run.json, atomically; the new content."""
        with self._mutex():
            return self._write_info({**self.info(), **fields})

    def begin_attempt(self, **facts: Any) -> int:
        """Counts a new attempt, which fences off all earlier ones, and forgets an old stop request; its number, from 1.

        ``facts`` (versions, git_commit, ranks, ...) go into the attempt's entry of run.json.
        """
        with self._mutex():
            info = self.info()
            attempt = int(info.get("fence", 0)) + 1
            entry = {"attempt": attempt, "started": time.time(), "from_step": self.newest_checkpoint_step(), **facts}
            identity = {"id": info.get("id") or uuid.uuid4().hex, "created": info.get("created") or time.time()}
            self._write_info({**info, **identity, "fence": attempt, "attempts": [*info.get("attempts", []), entry]})
        self.stop_file.unlink(missing_ok=True)
        return attempt

    def end_attempt(self, attempt: int, **facts: Any) -> None:
        """Adds how an attempt ended to its entry in run.json."""
        ending = {"ended": time.time(), "to_step": self.newest_checkpoint_step(), **facts}
        with self._mutex():
            info = self.info()
            entries = [{**e, **ending} if e["attempt"] == attempt else e for e in info.get("attempts", [])]
            self._write_info({**info, "attempts": entries})

    def attempts(self) -> list[dict[str, Any]]:
        """The attempts in run.json, oldest first."""
        return list(self.info().get("attempts", []))

    def check_fence(self, attempt: int) -> None:
        """Raises RunFailed where a newer attempt has begun: this one must not write any more."""
        fence = int(self.info().get("fence", 0))
        if fence > attempt:
            raise RunFailed(
                f"attempt {attempt} of {self.path} has been replaced by attempt {fence}",
                "nothing to do: the newer attempt goes on from the last checkpoint",
            )

    def newest_checkpoint_step(self) -> int | None:
        """Step of the newest committed checkpoint (one that has its manifest), none if there is none."""
        names = [path.parent.name for path in self.checkpoints.glob("step-*/manifest.json")]
        return max((int(match[1]) for match in map(STEP.fullmatch, names) if match), default=None)

    def request_stop(self, by: str) -> None:
        """Asks the run to save and stop; ``by`` says who asks. The first request stays, but for a signal's."""
        replaces = is_signal(self.stop_requested_by() or "") and not is_signal(by)
        with contextlib.suppress(FileExistsError), open(self.stop_file, "w" if replaces else "x") as file:
            file.write(by + "\n")

    def stop_requested_by(self) -> str | None:
        """Who asked the run to stop, none if nobody did. An empty STOP file was made by a person."""
        try:
            return self.stop_file.read_text(errors="replace").strip() or "STOP file"
        except PermissionError:  # somebody's who shares nothing that he makes
            return "STOP file"
        except OSError:  # there is none, or a file server does not tell now
            return None

    # events

    def monitor_event(self, event: str, step: int, **fields: Any) -> None:
        """Appends to monitor/events.jsonl; the first node agent only.

        Raises:
            RunFailed: it cannot be written (full disk).
        """
        line = events.encode(event_now(event, step, fields))
        try:
            if append_bytes(self.monitor_events, line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise _cannot_write(self.monitor_events, error) from error

    def read_events(self) -> list[dict[str, Any]]:
        """All events of the run by time: both files merged, torn lines dropped, repeated steps resolved."""
        found = []
        for path in (self.events, self.monitor_events):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                found += events.decode(path.read_bytes())
        return events.resolve(found)

    def read_words(self, attempt: int) -> dict[str, Any]:
        """The merged last words of an attempt; empty where there are none."""
        try:
            return dict(json.loads(self.words(attempt).read_bytes()))
        except (FileNotFoundError, ValueError):
            return {}

    def _write_info(self, info: dict[str, Any]) -> dict[str, Any]:
        write_atomically(self.run_json, json.dumps(info, indent=2).encode() + b"\n")
        return info

    @contextlib.contextmanager
    def _mutex(self) -> Iterator[None]:
        """Excludes other updates of run.json, by an exclusive create: that works where flock does not."""
        path = self.path / "run.json.lock"
        holder, since = None, time.monotonic()
        while not create_exclusively(path, b""):
            if (now := _identity(path)) != holder:
                holder, since = now, time.monotonic()
            elif time.monotonic() - since > MUTEX_STALE_S:
                path.unlink(missing_ok=True)
            time.sleep(0.01)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


STEP = re.compile(r"step-(\d+)")


def is_signal(by: str) -> bool:
    """Whether a stop was asked for by a signal, rather than by a person's STOP file."""
    return by.startswith("signal ")


def current_attempt() -> int:
    """The attempt this process belongs to, from its environment; 1 where nobody counts."""
    return int(os.environ.get(ATTEMPT) or 1)


def _is_info(value: Any) -> bool:
    """Whether this can be the content of run.json."""
    if not isinstance(value, dict) or not isinstance(value.get("fence", 0), int):
        return False
    entries = value.get("attempts", [])
    return isinstance(entries, list) and all(isinstance(e, dict) and isinstance(e.get("attempt"), int) for e in entries)


def write_atomically(path: Path, content: bytes) -> None:
    """Replaces a file by one with this content; after a crash there is the old or the new one, never a mixture.

    Raises:
        RunFailed: it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise _cannot_write(path, error) from error


def event_now(event: str, step: int, fields: Mapping[str, Any]) -> events.Event:
    """An event of this process's attempt, and of now unless the fields tell its time."""
    return {"time": time.time(), "event": event, "step": step, "attempt": current_attempt(), **fields}


def append_bytes(path: Path, lines: bytes) -> int:
    """Appends whole lines in one write; how many bytes of them there was room for.

    A line that a crash or a full disk tore before is closed first, so that it spoils nothing. Raises OSError.
    """
    handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(handle).st_size
        torn = size > 0 and os.pread(handle, 1, size - 1) != b"\n"
        return max(0, os.write(handle, b"\n" * torn + lines) - torn)
    finally:
        os.close(handle)


def create_exclusively(path: Path, content: bytes) -> bool:
    """Makes a file with this content; False where it exists. Exactly one of many callers gets True, on NFS too.

    Raises:
        RunFailed: it cannot be written.
    """
    try:
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        try:
            os.write(handle, content)
        finally:
            os.close(handle)
    except FileExistsError:
        return False
    except OSError as error:
        raise _cannot_write(path, error) from error
    return True


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns


def _cannot_write(path: Path, error: OSError) -> RunFailed:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    fix = "free space or raise the quota there" if full else "check that the folder exists and may be written"
    return RunFailed(f"cannot write {path}: {error.strerror}", f"{fix}, then run the same command again: it resumes")
