"""Reads and writes files of events. Each file has one writer; readers read it whole or follow it as it grows."""

from __future__ import annotations

import contextlib
import errno
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from hpctrain.errors import HpctrainError
from hpctrain.run.events import Decoder, Event, decode, encode, resolve
from hpctrain.run.folder import RunDir
from hpctrain.run.progress import Progress
from hpctrain.run.tail import Tail
from hpctrain.system import safe_read
from hpctrain.system.files import append_bytes
from hpctrain.system.retry import retry_files

MOST_WAITING = 10_000
"""Maximum number of unwritten events kept in memory (some MiB); the oldest are dropped first."""


class EventWriter:
    """Appends one process's events to a file. A full disk, a quota or a lost file server does not stop training.

    Each ``append`` tries to write the event together with those still waiting. Use it from one thread.

    Args:
        path: events.jsonl; created with the first event.
        say: shows a message to the user: once when events cannot be written, and at the end how many are lost.
    """

    def __init__(self, path: Path, say: Callable[[str], object]) -> None:
        self.path = path
        self.say = say
        self.waiting: deque[bytes] = deque()
        self.num_lost = 0
        self.has_warned = False

    def append(self, event: Event) -> None:
        """Writes an event, or keeps it to be written later."""
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
        """Tries once more to write what is waiting, and reports what is lost."""
        problem = self._write() if self.waiting else None
        self.num_lost += len(self.waiting)
        self.waiting.clear()
        if self.num_lost:
            self.say(f"{problem or self.path}: events of this run that are lost: {self.num_lost}")
        self.num_lost = 0

    def _write(self) -> str | None:
        """Writes waiting events in order; returns why some are still waiting, or None."""
        try:
            written = append_bytes(self.path, b"".join(self.waiting), self.path.parent)
        except OSError as error:
            return f"{self.path} cannot be written: {error.strerror}"
        while self.waiting and written >= len(self.waiting[0]) - 1:  # the next write supplies a missing newline
            written -= len(self.waiting.popleft())
        return f"{self.path} cannot be written: {os.strerror(errno.ENOSPC)}" if self.waiting else None


def stored_events(path: Path, decoder: Decoder | None = None, marked: Sequence[bytes] = (b"",)) -> Iterator[Event]:
    """Yields the events of one file in order; none if it does not exist or is not a regular file.

    Decodes only lines that contain one of ``marked``.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, safe_read.NotPlain):
        lines = (line for line in safe_read.lines(path) if any(mark in line for mark in marked))
        yield from (decoder or Decoder()).events(lines)


def stored_events_at_end(path: Path, most_bytes: int = 1 << 18) -> list[Event]:
    """Returns the events in the last ``most_bytes`` of a file; none if it does not exist."""
    try:
        handle = safe_read.open_plain(path)
    except (FileNotFoundError, NotADirectoryError, safe_read.NotPlain):
        return []
    with os.fdopen(handle, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - most_bytes))
        return decode(file.read(most_bytes))


def read_events(run: RunDir) -> list[Event]:
    """Returns all events of a run by time, from both files, without torn lines and steps computed again later."""
    return resolve(event for path in (run.events, run.monitor_events) for event in stored_events(path))


def events_if_readable(run: RunDir) -> list[Event]:
    """Returns all events of a run, for estimates that nothing waits for; none if they cannot be read."""
    with contextlib.suppress(HpctrainError, OSError):
        return retry_files(lambda: read_events(run))
    return []


class EventFollower:
    """Follows both event files of a run and updates its ``progress``. Reads each byte once and never writes."""

    def __init__(self, run: RunDir) -> None:
        self.tails = [Tail(run.events), Tail(run.monitor_events)]
        self.progress = Progress()
        self.decoder = Decoder()

    @property
    def is_behind(self) -> bool:
        """Whether the last look left something unread."""
        return any(tail.is_behind for tail in self.tails)

    def look(self) -> None:
        """Reads a portion of the new events.

        Raises:
            UserError: no permission to read the files.
        """
        restarts = self._restarts()
        portions = [tail.lines() for tail in self.tails]
        if self._restarts() != restarts:  # a file was replaced: another run uses the folder
            self.progress, self.decoder = Progress(), Decoder()
        for portion in portions:
            for event in self.decoder.events(portion.split(b"\n")):
                self.progress.add(event)

    def _restarts(self) -> int:
        return sum(tail.restarts for tail in self.tails)
