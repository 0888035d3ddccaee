"""The files that events are in: written by one process each, read as a whole, or followed as they grow."""

from __future__ import annotations

import contextlib
import errno
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from hpctrain.run.events import Decoder, Event, decode, encode, resolve
from hpctrain.run.folder import RunDir
from hpctrain.run.growing_file import Tail
from hpctrain.run.progress import Progress
from hpctrain.system import safe_read
from hpctrain.system.files import append_bytes

MOST_WAITING = 10_000
"""Events that are kept at most, some MiB; the oldest go first."""


class EventWriter:
    """Appends one process's events to a file. A full disk, a quota or a lost file server costs no step of training.

    Each event is tried as it comes, together with those that wait. Use from one thread.

    Args:
        path: events.jsonl; made with the first event.
        say: reports to the person who runs it: once that events cannot be written, and at the end which are lost.
    """

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self.path = path
        self.say = say
        self.waiting: deque[bytes] = deque()
        self.num_lost = 0
        self.has_warned = False

    def append(self, event: Event) -> None:
        """Writes an event, now or later."""
        self.waiting.append(encode(event))
        if problem := self._write():
            if not self.has_warned:
                self.has_warned = True
                self.say(
                    f"{problem}; training continues, its events wait in memory\n"
                    "  fix: free space or raise the quota there, and they are written after all"
                )
            if len(self.waiting) > MOST_WAITING:
                self.waiting.popleft()
                self.num_lost += 1

    def close(self) -> None:
        """Tries once more, and says what is lost."""
        problem = self._write() if self.waiting else None
        self.num_lost += len(self.waiting)
        self.waiting.clear()
        if self.num_lost:
            self.say(f"{problem or self.path}: events of this run that are lost: {self.num_lost}")
        self.num_lost = 0

    def _write(self) -> str | None:
        """Writes what waits, in order; why something still waits."""
        try:
            written = append_bytes(self.path, b"".join(self.waiting), self.path.parent)
        except OSError as error:
            return f"{self.path} cannot be written: {error.strerror}"
        while self.waiting and written >= len(self.waiting[0]) - 1:  # the next write supplies a newline that is missing
            written -= len(self.waiting.popleft())
        return f"{self.path} cannot be written: {os.strerror(errno.ENOSPC)}" if self.waiting else None


def stored_events(path: Path, decoder: Decoder | None = None, marked: Sequence[bytes] = (b"",)) -> Iterator[Event]:
    """The events of one file, in its order; none if there is no such file, or it is not a plain one.

    Only lines that hold one of ``marked`` are decoded.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, safe_read.NotPlain):
        lines = (line for line in safe_read.lines(path) if any(mark in line for mark in marked))
        yield from (decoder or Decoder()).events(lines)


def stored_events_at_end(path: Path, most_bytes: int = 1 << 18) -> list[Event]:
    """The last events of a file that fit into ``most_bytes``; none if there is no such file."""
    try:
        handle = safe_read.open_plain(path)
    except (FileNotFoundError, NotADirectoryError, safe_read.NotPlain):
        return []
    with os.fdopen(handle, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - most_bytes))
        return decode(file.read(most_bytes))


def read_events(run: RunDir) -> list[Event]:
    """All events of a run by time: both files merged, torn lines dropped, repeated steps resolved."""
    return resolve(event for path in (run.events, run.monitor_events) for event in stored_events(path))


class EventFollower:
    """Both event files of one run, summed up as they grow. Reads each byte once and never writes."""

    def __init__(self, run: RunDir) -> None:
        self.tails = [Tail(run.events), Tail(run.monitor_events)]
        self.progress = Progress()
        self.decoder = Decoder()

    @property
    def is_behind(self) -> bool:
        """Whether there is more than the last look took."""
        return any(tail.is_behind for tail in self.tails)

    def look(self) -> None:
        """Takes in a portion of what is new.

        Raises:
            UserError: the files may not be read.
        """
        restarts = self._restarts()
        portions = [tail.lines() for tail in self.tails]
        if self._restarts() != restarts:  # another run in the same place
            self.progress, self.decoder = Progress(), Decoder()
        for portion in portions:
            for event in self.decoder.events(portion.split(b"\n")):
                self.progress.add(event)

    def _restarts(self) -> int:
        return sum(tail.restarts for tail in self.tails)
