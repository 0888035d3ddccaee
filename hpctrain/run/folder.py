"""The run folder: where things are, who the run is, and its events. Everybody finds them through here."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.errors import Replaced, UserError
from hpctrain.run import events, step_folder
from hpctrain.run.documents import info_of, is_words
from hpctrain.run.rank_environment import ATTEMPT
from hpctrain.system import foreign_text, safe_read
from hpctrain.system.files import (
    Diverted,
    append_bytes,
    cannot_write,
    create_exclusively,
    make_folder,
    write_atomically,
)

if TYPE_CHECKING:
    from hpctrain.config.sections import Config

MOST_STOP_BYTES = 1024
"""Of a STOP file, which says who asks."""


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
        """Identity and attempts: what to read. Put together from the attempts' own files at each change."""
        return self.path / "run.json"

    @property
    def numbers(self) -> Tickets:
        """One number an attempt, the fence between them: attempts/<number>.json and what the attempt adds to it."""
        return Tickets(self.path / "attempts", self.path)

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
            for folder in (self.monitor, self.ranks, self.checkpoints, self.logs):
                make_folder(folder, self.path)
        except Diverted as error:
            fix = "remove it, or set run_dir to another folder; for more space, put the whole run folder elsewhere"
            raise UserError(f"{error.strerror}", fix) from error
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
            info = info_of(safe_read.read_json(self.run_json))
            if info is None:
                raise ValueError("its fields are not of the types that they should be")
        except FileNotFoundError:
            return {}
        except (ValueError, safe_read.NotPlain, safe_read.TooLarge) as error:
            why = error.strerror if isinstance(error, OSError) else error
            fix = f"remove it: the next attempt writes it again from what {self.numbers.folder} holds"
            raise UserError(f"{self.run_json} is damaged: {why}", fix) from error
        return info

    def update(self, **fields: Any) -> dict[str, Any]:
        """Sets fields of run.json that this process's attempt has found out; the new content of run.json."""
        return self._note(current_attempt(), "fields", fields)

    def begin_attempt(self, **facts: Any) -> int:
        """Counts a new attempt, which fences off all earlier ones, and forgets an old stop request; its number, from 1.

        ``facts`` (versions, git_commit, ranks, ...) go into the attempt's entry of run.json.
        """
        info = self.info()
        entry = {"started": time.time(), "from_step": self.newest_checkpoint_step(), **facts}
        identity = {"id": info.get("id") or uuid.uuid4().hex, "created": info.get("created") or time.time()}
        attempt = self.numbers.take(_json({"run": identity, "attempt": entry}), above=info.get("fence", 0))
        self._summarise()
        self.stop_file.unlink(missing_ok=True)
        return attempt

    def end_attempt(self, attempt: int, **facts: Any) -> None:
        """Adds how an attempt ended to its entry in run.json."""
        self._note(attempt, "ended", {"ended": time.time(), "to_step": self.newest_checkpoint_step(), **facts})

    def attempts(self) -> list[dict[str, Any]]:
        """The attempts in run.json, oldest first."""
        return list(self.info().get("attempts", []))

    def fence(self) -> int:
        """Number of the newest attempt, 0 before the first. Older versions keep it in run.json alone."""
        written = 0
        with contextlib.suppress(UserError):  # damaged; the attempts of this version have their own files
            written = self.info().get("fence", 0)
        return max(written, self.numbers.newest())

    def check_fence(self, attempt: int) -> None:
        """Whether an attempt may still write.

        Raises:
            Replaced: a newer one has begun.
            OSError: that cannot be seen now.
        """
        if (fence := self.fence()) > attempt:
            raise Replaced(f"attempt {attempt} of {self.path} has been replaced by attempt {fence}")

    def newest_checkpoint_step(self) -> int | None:
        """Step of the newest committed checkpoint (one that has its manifest), none if there is none."""
        found = (step_folder.step_of(path.parent.name) for path in self.checkpoints.glob("step-*/manifest.json"))
        return max((step for step in found if step is not None), default=None)

    def request_stop(self, by: str) -> None:
        """Asks the run to save and stop; ``by`` says who asks. The first request stays, but for a signal's.

        Raises:
            RunFailed: the STOP file cannot be made.
        """
        content = f"{by}\n".encode()
        if is_signal(self.stop_requested_by() or "") and not is_signal(by):
            write_atomically(self.stop_file, content, self.path)
        else:
            create_exclusively(self.stop_file, content, self.path)

    def stop_requested_by(self) -> str | None:
        """Who asked the run to stop, none if nobody did. An empty STOP file was made by a person."""
        try:
            said = safe_read.head(self.stop_file, MOST_STOP_BYTES).decode(errors="replace")
            return foreign_text.line(said).strip() or "STOP file"
        except (PermissionError, safe_read.NotPlain):  # somebody's who shares nothing that he makes, or a folder
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
            if append_bytes(self.monitor_events, line, self.path) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise cannot_write(self.monitor_events, error) from error

    def read_events(self) -> list[dict[str, Any]]:
        """All events of the run by time: both files merged, torn lines dropped, repeated steps resolved."""
        found: list[events.Event] = []
        for path in (self.events, self.monitor_events):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError, safe_read.NotPlain):
                found += events.Decoder().events(safe_read.lines(path))
        return events.resolve(found)

    def read_words(self, attempt: int) -> dict[str, Any]:
        """The merged last words of an attempt; empty where there are none."""
        try:
            words: dict[str, Any] = safe_read.read_json(self.words(attempt))
            return words if is_words(words) else {}
        except (FileNotFoundError, safe_read.NotPlain, safe_read.TooLarge, ValueError):
            return {}

    def _note(self, attempt: int, what: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Adds fields to one of an attempt's own files, which no other attempt writes; the new content of run.json."""
        path = self.numbers.path(attempt, what)
        self.numbers.make_folder()
        try:
            before = _read_object(path)
        except OSError as error:
            raise cannot_write(path, error) from error
        write_atomically(path, _json({**before, **fields}), self.path)
        return self._summarise()

    def _summarise(self) -> dict[str, Any]:
        """Writes run.json; its content.

        Nobody is locked out: a writer that sleeps, in an fsync perhaps, holds up nobody. What it replaces too late it
        puts right by itself, since each writer looks again until run.json is what the attempts' own files say.
        """
        written = b""
        try:
            while (content := _json(info := self._gather())) != written:
                write_atomically(self.run_json, content, self.path)
                written = content
        except OSError as error:
            raise cannot_write(self.run_json, error) from error
        return info

    def _gather(self) -> dict[str, Any]:
        """run.json by the attempts' own files; what an older version wrote into it alone stays."""
        info = self.info()
        entries = {entry["attempt"]: entry for entry in info.get("attempts", [])}
        taken = self.numbers.taken()
        identity: dict[str, Any] = {}
        fields: dict[str, Any] = {}
        for number in sorted({*entries, *taken}):
            begun, added, ended = (_read_object(self.numbers.path(number, what)) for what in ("", "fields", "ended"))
            entries[number] = {"attempt": number, **entries.get(number, {}), **_object(begun.get("attempt")), **ended}
            identity = identity or _object(begun.get("run"))
            fields |= added
        fence = max([info.get("fence", 0), *taken])
        return {**info, **identity, **fields, "fence": fence, "attempts": [entries[key] for key in sorted(entries)]}


@dataclass(frozen=True)
class Tickets:
    """Numbers that only go up: each is a file that exactly one process creates, and nobody changes or removes."""

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
        """Makes the folder. Raises RunFailed where it cannot be made."""
        try:
            make_folder(self.folder, self.run)
        except OSError as error:
            raise cannot_write(self.folder, error) from error

    def claim(self, number: int, content: bytes) -> bool:
        """Takes this number; False where another process has it. Raises RunFailed where it cannot be written."""
        self.make_folder()
        return create_exclusively(self.path(number), content, self.run)

    def take(self, content: bytes, above: int = 0) -> int:
        """Takes the next number, higher than ``above`` and than all that are taken. Raises RunFailed, see ``claim``."""
        try:
            number = max(above, self.newest()) + 1
        except OSError as error:
            raise cannot_write(self.folder, error) from error
        while not self.claim(number, content):
            number += 1
        return number


TICKET = re.compile(r"(\d+)\.json")


def is_signal(by: str) -> bool:
    """Whether a stop was asked for by a signal, rather than by a person's STOP file."""
    return by.startswith("signal ")


def current_attempt() -> int:
    """The attempt this process belongs to, from its environment; 1 where nobody counts."""
    return int(os.environ.get(ATTEMPT) or 1)


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=2).encode() + b"\n"


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _read_object(path: Path) -> dict[str, Any]:
    """Empty where there is none yet, or a crash has torn it."""
    try:
        return _object(safe_read.read_json(path))
    except (FileNotFoundError, safe_read.NotPlain, safe_read.TooLarge, ValueError):
        return {}


def event_now(event: str, step: int, fields: Mapping[str, Any]) -> events.Event:
    """An event of this process's attempt, and of now unless the fields tell its time."""
    return {"time": time.time(), "event": event, "step": step, "attempt": current_attempt(), **fields}
