"""Last words: the small file in which each rank says how it ended, and why.

A rank makes its file when it joins, in full size, and overwrites it in place when it ends: that works on a full disk
too, and the supervisor knows from the beginning which process on which host is which rank. Of ranks that die without a
word, the agent of the node notes when.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import time
from collections.abc import Iterable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

from hpctrain.errors import Code
from hpctrain.run import run_clock
from hpctrain.run.folder import RunDir
from hpctrain.run.rank_environment import ATTEMPT, RUN_DIR
from hpctrain.run.verdict import RunVerdict
from hpctrain.system import files, safe_read
from hpctrain.system.json_shape import is_count, maker, sound
from hpctrain.system.processes import birth, machine

FILE_BYTES = 16384
"""Room that a word reserves; a traceback beyond it is cut in its middle."""
MOST_WORD_BYTES = 1 << 18
"""Of one rank's last word."""


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


@dataclasses.dataclass(frozen=True)
class ErrorWord:
    """An error as the user is to see it."""

    what: str
    fix: str
    type: str
    """Name of the exception."""
    traceback: str
    """The full one is in the rank's log too."""
    code: Code = Code.UNKNOWN


@dataclasses.dataclass(frozen=True)
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


word_of = maker(LastWord)
"""From what ``LastWord.to_json`` gave; unknown fields are ignored. Raises ValueError for what cannot be that."""


def first_word(rank: int | None, oom_kills: int | None = None) -> LastWord:
    """This process, running."""
    host, pid = socket.gethostname(), os.getpid()
    return LastWord(rank, host, pid, birth(pid), time.time(), oom_kills=oom_kills, machine=machine())


@dataclasses.dataclass(frozen=True)
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
        with files.writing(self.path):
            files.make_folder(self.path.parent, self.run)
        files.write_atomically(self.path, padded(word), self.run)

    def end(self, word: LastWord) -> None:
        """Replaces the word in place. Does not raise: there is no one left to report to."""
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
            found.append(word_of(safe_read.read_json(path, MOST_WORD_BYTES)))
    return _by_rank(found)


@dataclasses.dataclass(frozen=True)
class AttemptWords:
    """The last words of an attempt's ranks, and what was concluded from them."""

    ranks: tuple[LastWord, ...]
    """By rank."""
    verdict: RunVerdict | None = None


def merge(run_dir: RunDir, attempt: int, words: Sequence[LastWord], verdict: RunVerdict) -> None:
    """Writes ranks/<attempt>.json and removes the pieces.

    Raises:
        RunFailed: it cannot be written; the pieces then stay.
    """
    content = {"attempt": attempt, "verdict": verdict.to_json(), "ranks": [word.to_json() for word in words]}
    files.write_atomically(run_dir.words(attempt), json.dumps(content, indent=1).encode() + b"\n", run_dir.path)
    with contextlib.suppress(OSError):
        files.remove_folder(pieces(run_dir, attempt), run_dir.path)


def read(run_dir: RunDir, attempt: int) -> AttemptWords | None:
    """The words of an attempt: merged, or if merging failed (full disk, dead supervisor) one by one."""
    try:
        saved = _merged(safe_read.read_json(run_dir.words(attempt)))
    except (FileNotFoundError, safe_read.NotPlain, safe_read.TooLarge, ValueError):
        words = collect(run_dir, attempt)
        return AttemptWords(tuple(words)) if words else None
    words = []
    for each in saved.get("ranks", ()):
        with contextlib.suppress(ValueError):  # of a newer version
            words.append(word_of(each))
    return AttemptWords(tuple(_by_rank(words)), RunVerdict.from_json(saved.get("verdict") or {}))


_merged = sound({"attempt": is_count, "ranks": [dict]})


def _by_rank(words: Iterable[LastWord]) -> list[LastWord]:
    return sorted(words, key=lambda word: (word.rank is None, word.rank or 0))


HEAD_BYTES = 2048
"""A word without a traceback is shorter; the rest of its file is blank."""
READ_BYTES_A_LOOK = 8 << 20
"""After that much the remaining files wait for the next look."""
SETTLED_S = 2.0
"""A file that was written later than this may change again within the resolution of its time stamp."""

Stamp = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Seen:
    """A file as it was read."""

    stamp: Stamp | None
    """Time of its last change, and size; None if it is to be read again."""
    word: LastWord


class WordReader:
    """The words of one attempt's ranks.

    Args:
        folder: of the words, one file a rank.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seen: dict[str, Seen] = {}
        self.bytes_read = 0
        """By all looks."""

    def look(self) -> list[LastWord]:
        """The words that are known now, by rank."""
        most = self.bytes_read + READ_BYTES_A_LOOK
        with contextlib.suppress(OSError), os.scandir(self.folder) as entries:
            for entry in entries:
                if not entry.name.endswith(".json"):
                    continue
                try:
                    status = entry.stat()
                except OSError:
                    continue
                stamp = status.st_mtime_ns, status.st_size
                seen = self.seen.get(entry.name)
                if (seen is None or seen.stamp != stamp) and self.bytes_read < most:
                    self._take(entry, stamp)
        return _by_rank(seen.word for seen in self.seen.values())

    def _take(self, entry: os.DirEntry[str], stamp: Stamp) -> None:
        """Reads a file. What cannot be read now keeps its earlier word."""
        with contextlib.suppress(OSError, ValueError):
            word, settled = word_of(self._read(entry.path)), time.time() - stamp[0] / 1e9 > SETTLED_S
            self.seen[entry.name] = Seen(stamp if settled else None, word)

    def _read(self, path: str) -> Any:
        """A file's JSON; the blanks after it are left out."""
        content = safe_read.head(path, HEAD_BYTES)
        self.bytes_read += len(content)
        with contextlib.suppress(ValueError):
            return safe_read.parse_json(content)
        content = safe_read.read(path, MOST_WORD_BYTES)
        self.bytes_read += len(content)
        return safe_read.parse_json(content)


@dataclasses.dataclass(frozen=True)
class NotedDeath:
    """What an agent saw."""

    at: float
    """Unix seconds by the clock of rank 0's host."""
    rank: int
    code: int | None = None
    """Exit code, or minus the signal; None if that is not known."""


def note_death(rank: int, code: int | None = None) -> None:
    """Appends to the deaths of this attempt; outside a supervised run they are not read. See ``NotedDeath``."""
    folder, attempt = os.environ.get(RUN_DIR), os.environ.get(ATTEMPT)
    if folder and attempt:
        line = f"{run_clock.now():.6f} {rank} {'' if code is None else code}\n".encode()
        with contextlib.suppress(OSError):
            files.append_bytes(_deaths_file(RunDir(Path(folder)), attempt), line, Path(folder))


def noted_deaths(run: RunDir, attempt: int) -> list[NotedDeath]:
    """The deaths of an attempt, the first one first."""
    try:
        lines = safe_read.read(_deaths_file(run, str(attempt))).decode(errors="replace").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        with contextlib.suppress(ValueError):  # a line that was cut off
            seconds, rank, *code = line.split()
            found.append(NotedDeath(float(seconds), int(rank), *map(int, code[:1])))
    return sorted(found, key=lambda noted: (noted.at, noted.rank))


def _deaths_file(run: RunDir, attempt: str) -> Path:
    return run.monitor / f"deaths-{attempt}.txt"
