"""Last words: a small file in which each rank says how and why it ended.

A rank creates its file in full size when it joins and overwrites it in place when it ends. So writing works on a full
disk too, and the supervisor knows from the beginning which process on which host is which rank. If a rank dies without
a last word, its node's agent notes when.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import socket
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

from hpctrain.errors import Code, StoreDown, is_away
from hpctrain.run.folder import RunDir
from hpctrain.run.rank_environment import ATTEMPT, RUN_DIR
from hpctrain.run.verdict import RunVerdict
from hpctrain.system import files, safe_read
from hpctrain.system.json_shape import is_count, maker, sound
from hpctrain.system.processes import birth, machine
from hpctrain.system.retry import retry_files

FILE_BYTES = 16384
"""Size of a rank's file; the middle of a longer traceback is cut out."""
MERGED_BYTES = 16 << 20
"""Size of an attempt's merged words from which long errors are shortened: it must not become too large to be read."""
MOST_WORD_BYTES = 1 << 18
"""Maximum size of a rank's file when reading."""
AHEAD_S = "HPCTRAIN_CLOCK_AHEAD_S"
"""Environment variable: seconds by which this host's clock is ahead; inherited by processes that a rank starts."""
ROUNDS = 4


class Ending(StrEnum):
    """How a rank ended."""

    RUNNING = "running"
    """It has not reported an end."""
    COMPLETED = "completed"
    EARLY = "early_stop"
    STOPPED = "stop_requested"
    """A checkpoint was saved on request."""
    FAILED = "failed"
    """An error on this rank; see ``LastWord.error``."""
    TAKEN_DOWN = "taken_down"
    """Ended because another rank failed, or because the supervisor ended the attempt."""
    KILLED = "killed"
    """Died from a signal, or exited outside Python's control; set by the supervisor."""
    VANISHED = "vanished"
    """Ended without a last word, for an unknown reason; set by the supervisor."""


GOOD_ENDINGS = (Ending.COMPLETED, Ending.EARLY, Ending.STOPPED)


@dataclasses.dataclass(frozen=True)
class ErrorWord:
    """An error as shown to the user."""

    what: str
    fix: str
    type: str
    """Name of the exception's class."""
    traceback: str
    """The traceback, perhaps shortened; the rank's log has all of it."""
    code: Code = Code.UNKNOWN


@dataclasses.dataclass(frozen=True)
class LastWord:
    """What is known of one rank of one attempt."""

    rank: int | None
    """Rank; None if the process never learned it."""
    host: str
    pid: int
    birth: float
    """Start time of the process in the host's clock ticks; with host and pid it identifies the process uniquely."""
    started: float
    """Unix seconds."""
    ending: Ending = Ending.RUNNING
    ended: float | None = None
    """Unix seconds."""
    exit_code: int | None = None
    """The exit code that the process intended; launchers do not report it reliably."""
    step: int | None = None
    weights_hash: str | None = None
    """SHA-256 of the rank's part of the model parameters."""
    error: ErrorWord | None = None
    note: str | None = None
    """What the supervisor found out about the end."""
    code: Code | None = None
    """``note`` as a code: killed, out_of_memory, vanished."""
    oom_kills: int | None = None
    """The control group's count of out-of-memory kills when this rank started."""
    machine: str | None = None
    """Scope of pid and birth: the host's boot and the container's process namespace."""
    joined: bool = True
    """Whether MPI has connected it to the other ranks; until then, ``rank`` is what the launcher's variables say."""

    @property
    def is_starting(self) -> bool:
        """Whether it waits for MPI to connect it."""
        return self.ending is Ending.RUNNING and not self.joined

    def to_json(self) -> dict[str, Any]:
        """Returns all known fields."""
        return {key: value for key, value in dataclasses.asdict(self).items() if value is not None}


word_of = maker(LastWord)
"""Inverse of ``LastWord.to_json``; ignores unknown fields. Raises ValueError for anything else."""


def first_word(rank: int | None, oom_kills: int | None = None) -> LastWord:
    """Returns the initial word of this process: it is running."""
    host, pid = socket.gethostname(), os.getpid()
    return LastWord(rank, host, pid, birth(pid), time.time(), oom_kills=oom_kills, machine=machine())


@dataclasses.dataclass(frozen=True)
class WordFile:
    """One rank's file, ranks/<attempt>/<host>-<pid>-<machine>.json: a rank may not know its number."""

    path: Path
    run: Path
    """The run folder; symbolic links below it are not followed."""

    @classmethod
    def of(cls, run_dir: RunDir, attempt: int, word: LastWord) -> WordFile:
        """Returns the file for this word. Processes in different containers may have the same host name and PID."""
        scope = zlib.crc32((word.machine or "").encode())
        return cls(pieces(run_dir, attempt) / f"{word.host}-{word.pid}-{scope:08x}.json", run_dir.path)

    def begin(self, word: LastWord) -> None:
        """Writes the first word, which reserves the space for the last one.

        Raises:
            RunFailed: the folder cannot be written.
        """

        def write() -> None:
            with files.writing(self.path):
                files.make_folder(self.path.parent, self.run)
            files.write_atomically(self.path, padded(word), self.run)

        retry_files(write)

    def end(self, word: LastWord) -> None:
        """Overwrites the word in place. Raises no error, since there is no one left to report it to."""

        def write() -> None:
            files.make_folder(self.path.parent, self.run)
            files.overwrite(self.path, padded(word), self.run)

        with contextlib.suppress(OSError, StoreDown):
            retry_files(write)


def padded(word: LastWord) -> bytes:
    """Encodes a word as JSON, padded with blanks to FILE_BYTES; shortens the traceback if it does not fit."""
    return json.dumps(shortened(word, FILE_BYTES)).encode().ljust(FILE_BYTES - 1) + b"\n"


def shortened(word: LastWord, most_bytes: int) -> dict[str, Any]:
    """Returns the word for JSON; shortens the traceback, and bounds the sentences, of one that exceeds the limit."""
    if word.error is not None and len(json.dumps(word.to_json())) >= most_bytes:
        trace = word.error.traceback
        begin = most_bytes // 16
        end = most_bytes * 5 // 16
        shorter = trace if len(trace) <= begin + end else trace[:begin] + "\n...\n" + trace[-end:]
        what, fix = word.error.what[:2000], word.error.fix[:1000]
        word = dataclasses.replace(word, error=dataclasses.replace(word.error, what=what, fix=fix, traceback=shorter))
    return word.to_json()


def pieces(run_dir: RunDir, attempt: int) -> Path:
    """Returns the folder of the ranks' own files, which exists until they are merged."""
    return run_dir.ranks / str(attempt)


def collect(run_dir: RunDir, attempt: int) -> list[LastWord]:
    """Reads the words that ranks have written so far, sorted by rank; leaves out those that cannot be read.

    Raises:
        StoreDown: none can be read at the moment.
    """
    found: list[LastWord] = []

    def read() -> None:
        found.clear()
        away: Exception | None = None
        for path in sorted(pieces(run_dir, attempt).glob("*.json")):
            try:
                found.append(word_of(safe_read.read_json(path, MOST_WORD_BYTES)))
            except (OSError, ValueError) as error:
                away = error if is_away(error) else away
        if away is not None:
            raise away

    try:
        retry_files(read)
    except StoreDown:
        if not found:
            raise
    return _by_rank(found)


@dataclasses.dataclass(frozen=True)
class AttemptWords:
    """The last words of an attempt's ranks, and the verdict."""

    ranks: tuple[LastWord, ...]
    """Last words, sorted by rank."""
    verdict: RunVerdict | None = None


def merge(run_dir: RunDir, attempt: int, words: Sequence[LastWord], verdict: RunVerdict) -> None:
    """Writes ranks/<attempt>.json and removes the ranks' own files.

    Raises:
        RunFailed: it cannot be written; the ranks' own files then remain.
    """
    ranks = [shortened(word, MERGED_BYTES // len(words)) for word in words]
    content = {"attempt": attempt, "verdict": verdict.to_json(), "ranks": ranks}
    text = json.dumps(content, indent=1).encode() + b"\n"
    retry_files(lambda: files.write_atomically(run_dir.words(attempt), text, run_dir.path))
    with contextlib.suppress(OSError):
        files.remove_folder(pieces(run_dir, attempt), run_dir.path)


def read(run_dir: RunDir, attempt: int) -> AttemptWords | None:
    """Reads the words of an attempt: the merged file, or the ranks' own files if they were not merged."""
    try:
        saved = _merged(retry_files(lambda: safe_read.read_json(run_dir.words(attempt))))
    except (FileNotFoundError, safe_read.NotPlain, safe_read.TooLarge, ValueError):
        words = collect(run_dir, attempt)
        return AttemptWords(tuple(words)) if words else None
    words = []
    for each in saved.get("ranks", ()):
        with contextlib.suppress(ValueError):  # written by a newer version
            words.append(word_of(each))
    return AttemptWords(tuple(_by_rank(words)), RunVerdict.from_json(saved.get("verdict") or {}))


_merged = sound({"attempt": is_count, "ranks": [dict]})


def _by_rank(words: Iterable[LastWord]) -> list[LastWord]:
    return sorted(words, key=lambda word: (word.rank is None, word.rank or 0))


HEAD_BYTES = 2048
"""Bytes read first: a word without a traceback is shorter, and the rest of its file is blank."""
READ_BYTES_A_LOOK = 8 << 20
"""Maximum bytes read per look; the remaining files wait for the next one."""
SETTLED_S = 2.0
"""Age below which a file is read again, since it may change within the resolution of its time stamp."""

Stamp = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class WordsFile:
    """A file that has been read."""

    stamp: Stamp | None
    """Modification time and size; None if the file must be read again."""
    word: LastWord


class WordReader:
    """Reads the words of one attempt's ranks again and again; only changed files are read.

    Args:
        folder: folder of the words, one file per rank.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seen: dict[str, WordsFile] = {}
        self.bytes_read = 0
        """Total bytes read."""

    def look(self) -> list[LastWord]:
        """Reads changed files; returns all known words, sorted by rank."""
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
        """Reads a file. If it cannot be read, the earlier word stays."""
        with contextlib.suppress(OSError, ValueError):
            word = word_of(self._read(entry.path))
            settled = time.time() - stamp[0] / 1e9 > SETTLED_S
            self.seen[entry.name] = WordsFile(stamp if settled else None, word)

    def _read(self, path: str) -> Any:
        """Reads a file's JSON: first its head, then all of it if it is longer."""
        content = safe_read.head(path, HEAD_BYTES)
        self.bytes_read += len(content)
        with contextlib.suppress(ValueError):
            return safe_read.parse_json(content)
        content = safe_read.read(path, MOST_WORD_BYTES)
        self.bytes_read += len(content)
        return safe_read.parse_json(content)


TOGETHER = "together"
"""Ends the line of a death that was not noted alone."""


@dataclasses.dataclass(frozen=True)
class NotedDeath:
    """A rank's death, as its node's agent saw it."""

    at: float
    """Unix seconds by the clock of rank 0's host."""
    rank: int
    code: int | None = None
    """Exit code, or minus the signal; None if unknown."""
    alone: bool = True
    """Whether every other process of the job on its host was alive and not being killed when the death was noted."""


def notes_deaths() -> bool:
    """Whether deaths are noted: in supervised runs."""
    return bool(os.environ.get(RUN_DIR) and os.environ.get(ATTEMPT))


def note_death(rank: int, code: int | None = None, alone: bool = True) -> None:
    """Appends a death to this host's file of the attempt; does nothing outside a supervised run. See ``NotedDeath``."""
    folder, attempt = os.environ.get(RUN_DIR), os.environ.get(ATTEMPT)
    if folder and attempt:
        line = f"{now():.6f} {rank} {'' if code is None else code} {'' if alone else TOGETHER}\n".encode()
        with contextlib.suppress(OSError):
            # A file per host: clients of NFS that append to one file at the same time overwrite each other's lines.
            path = RunDir(Path(folder)).monitor / f"deaths-{attempt}-{socket.gethostname()}.txt"
            files.append_bytes(path, line, Path(folder))


def noted_deaths(run: RunDir, attempt: int) -> list[NotedDeath]:
    """Returns the noted deaths of an attempt: those noted alone, then the others, each earliest first."""
    lines: list[str] = []
    with contextlib.suppress(OSError):
        for path in run.monitor.glob(f"deaths-{attempt}-*.txt"):
            lines += safe_read.read(path).decode(errors="replace").splitlines()
    found = []
    for line in lines:
        with contextlib.suppress(ValueError):  # a line that was cut off
            (seconds, rank, *code), together = line.removesuffix(TOGETHER).split(), line.endswith(TOGETHER)
            found.append(NotedDeath(float(seconds), int(rank), next(map(int, code), None), not together))
    return sorted(found, key=lambda noted: (not noted.alone, noted.at, noted.rank))


def now() -> float:
    """Returns Unix seconds by rank 0's clock, since the hosts' own clocks may differ by seconds."""
    return time.time() - float(os.environ.get(AHEAD_S) or 0)


def ahead_s(gather: Callable[[float], Sequence[float]]) -> float:
    """Estimates the seconds by which this clock is ahead of rank 0's; 0 if the messages allow that it is right.

    Collective; ``gather`` returns the values of all ranks.
    """
    most = math.inf
    least = -math.inf
    before = -math.inf
    for _ in range(ROUNDS):
        sent = time.time()
        first = gather(sent)[0]
        most = min(most, time.time() - first)
        least, before = max(least, before - first), sent  # rank 0 had received ``before`` when it sent this
    return 0.0 if least <= 0 <= most else (least + most) / 2
