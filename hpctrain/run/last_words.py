"""Last words: the small file in which each rank says how it ended, and why.

A rank makes its file when it joins, in full size, and overwrites it in place when it ends: that works on a full disk
too, and the supervisor knows from the beginning which process on which host is which rank.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from hpctrain.errors import Code
from hpctrain.run.documents import MOST_WORD_BYTES, is_word, is_words
from hpctrain.run.folder import RunDir
from hpctrain.run.verdict import Verdict
from hpctrain.system import files, safe_read
from hpctrain.system.processes import birth, machine

FILE_BYTES = 16384
"""Room that a word reserves; a traceback beyond it is cut in its middle."""


class Ending(StrEnum):
    """How a rank ended."""

    RUNNING = "running"
    """It has not ended, as far as it said itself."""
    COMPLETED = "completed"
    EARLY = "early_stop"
    STOPPED = "stop_requested"
    """A checkpoint was saved on request."""
    FAILED = "failed"
    """An error on this rank, named in the word."""
    TAKEN_DOWN = "taken_down"
    """Ended because another rank failed, or because the supervisor ended the attempt."""
    KILLED = "killed"
    """Died of a signal or an exit from outside Python; written by the supervisor."""
    VANISHED = "vanished"
    """Ended without a word or a trace; written by the supervisor."""


GOOD_ENDINGS = (Ending.COMPLETED, Ending.EARLY, Ending.STOPPED)


@dataclass(frozen=True)
class ErrorWord:
    """An error as the user is to see it."""

    what: str
    fix: str
    type: str
    """Name of the exception."""
    traceback: str
    """The full one is in the rank's log too."""
    code: Code = Code.UNKNOWN

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> ErrorWord:
        """What ``LastWord.to_json`` made of it; unknown fields are ignored."""
        return cls(saved["what"], saved["fix"], saved["type"], saved["traceback"], Code.read(saved.get("code")))


@dataclass(frozen=True)
class LastWord:
    """What is known of one rank of one attempt."""

    rank: int | None
    """None if it never learned its rank."""
    host: str
    pid: int
    birth: float
    """When the process started, in the host's clock ticks: with host and pid it names the process for good."""
    started: float
    """Unix seconds."""
    ending: Ending = Ending.RUNNING
    ended: float | None = None
    """Unix seconds."""
    exit_code: int | None = None
    """What the process meant to exit with; launchers lose it."""
    step: int | None = None
    weights_hash: str | None = None
    """sha256 over what the rank has of the model's parameters."""
    error: ErrorWord | None = None
    note: str | None = None
    """What the supervisor found out."""
    code: Code | None = None
    """The same for programs: killed, out_of_memory, vanished."""
    oom_kills: int | None = None
    """Processes that the kernel had killed for memory in this rank's control group when it started."""
    machine: str | None = None
    """Where pid and birth mean something: the host's boot and the container's process namespace."""

    def to_json(self) -> dict[str, Any]:
        """All fields that are known."""
        return {key: value for key, value in dataclasses.asdict(self).items() if value is not None}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> LastWord:
        """What ``to_json`` gave; unknown fields are ignored."""
        fields = {"rank": None, **{key: value for key, value in saved.items() if key in cls.__match_args__}}
        fields["ending"] = Ending(fields.get("ending", Ending.RUNNING))
        fields["error"] = ErrorWord.from_json(fields["error"]) if fields.get("error") else None
        fields["code"] = Code.read(fields["code"]) if fields.get("code") else None
        return cls(**fields)


def first_word(rank: int | None, oom_kills: int | None = None) -> LastWord:
    """This process, running."""
    host, pid = socket.gethostname(), os.getpid()
    return LastWord(rank, host, pid, birth(pid), time.time(), oom_kills=oom_kills, machine=machine())


@dataclass(frozen=True)
class WordFile:
    """One rank's file, ranks/<attempt>/<host>-<pid>.json: named by process, since a rank may not know its number."""

    path: Path
    run: Path
    """The run folder, below which no link is followed."""

    @classmethod
    def of(cls, run_dir: RunDir, attempt: int, word: LastWord) -> WordFile:
        """Where this word belongs."""
        return cls(pieces(run_dir, attempt) / f"{word.host}-{word.pid}.json", run_dir.path)

    def begin(self, word: LastWord) -> None:
        """Writes the word and reserves the room for the last one.

        Raises:
            RunFailed: the folder cannot be written.
        """
        try:
            files.make_folder(self.path.parent, self.run)
        except OSError as error:
            raise files.cannot_write(self.path, error) from error
        files.write_atomically(self.path, padded(word), self.run)

    def end(self, word: LastWord) -> None:
        """Replaces the word in place. Does not raise: there is nobody left to report to."""
        with contextlib.suppress(OSError):
            files.make_folder(self.path.parent, self.run)
            files.overwrite(self.path, padded(word), self.run)


def padded(word: LastWord) -> bytes:
    """JSON, filled up with blanks; the traceback is cut if the room does not suffice."""
    content = json.dumps(word.to_json()).encode()
    if len(content) >= FILE_BYTES and word.error is not None:
        trace = word.error.traceback
        shorter = trace[:1000] + "\n...\n" + trace[-5000:]
        error = dataclasses.replace(
            word.error, what=word.error.what[:2000], fix=word.error.fix[:1000], traceback=shorter
        )
        content = json.dumps(dataclasses.replace(word, error=error).to_json()).encode()
    return content.ljust(FILE_BYTES - 1) + b"\n"


def pieces(run_dir: RunDir, attempt: int) -> Path:
    """The folder of the ranks' own words, until they are merged."""
    return run_dir.ranks / str(attempt)


def collect(run_dir: RunDir, attempt: int) -> list[LastWord]:
    """The words that ranks wrote so far, by rank."""
    found = []
    for path in sorted(pieces(run_dir, attempt).glob("*.json")):
        with contextlib.suppress(OSError, ValueError):
            found.append(safe_read.read_json(path, MOST_WORD_BYTES))
    return _by_rank(word for word in found if is_word(word))


@dataclass(frozen=True)
class AttemptWords:
    """The last words of an attempt's ranks, and what was concluded from them."""

    ranks: tuple[LastWord, ...]
    """By rank."""
    verdict: Verdict | None = None


def merge(run_dir: RunDir, attempt: int, words: Sequence[LastWord], verdict: Verdict) -> None:
    """Writes ranks/<attempt>.json and removes the pieces.

    Raises:
        RunFailed: it cannot be written; the pieces then stay.
    """
    content = {"attempt": attempt, "verdict": verdict.to_json(), "ranks": [word.to_json() for word in words]}
    files.write_atomically(run_dir.words(attempt), json.dumps(content, indent=1).encode() + b"\n", run_dir.path)
    with contextlib.suppress(OSError):
        files.remove_folder(pieces(run_dir, attempt), run_dir.path)


def read(run_dir: RunDir, attempt: int) -> AttemptWords | None:
    """The words of an attempt: merged, or if nobody could merge them (full disk, dead supervisor) one by one."""
    try:
        saved = safe_read.read_json(run_dir.words(attempt))
    except (FileNotFoundError, safe_read.NotPlain, safe_read.TooLarge, ValueError):
        saved = None
    if not is_words(saved):
        words = collect(run_dir, attempt)
        return AttemptWords(tuple(words)) if words else None
    return AttemptWords(tuple(_by_rank(saved.get("ranks", ()))), Verdict.from_json(saved.get("verdict") or {}))


def _by_rank(saved: Iterable[Mapping[str, Any]]) -> list[LastWord]:
    """Those that are whole."""
    words: list[LastWord] = []
    for each in saved:
        with contextlib.suppress(ValueError, TypeError):
            words.append(LastWord.from_json(each))
    return sorted(words, key=lambda word: (word.rank is None, word.rank or 0))
