"""Telling what happens in a run must never end it: events that cannot be written are kept, and tried again."""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpctrain.run.events import Event, encode
from hpctrain.run.folder import event_now
from hpctrain.system.files import append_bytes

MOST_WAITING = 10_000
"""Events that are kept at most, some MiB; the oldest go first."""


class EventWriter:
    """Appends one process's events to a file. A full disk, a quota or a lost file server costs no step of training.

    Each event is tried as it comes, together with those that wait. Use from one thread.

    Args:
        path: events.jsonl; made with the first event.
        say: tells the person who runs it: once that events cannot be written, and at the end which are lost.
    """

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self.path = path
        self.say = say
        self.waiting: deque[bytes] = deque()
        self.num_lost = 0
        self.has_warned = False

    def append(self, event: str, step: int, **fields: Any) -> Event:
        """Writes an event, now or later, and returns it; a ``time`` among the fields is that of the event."""
        written = event_now(event, step, fields)
        self.waiting.append(encode(written))
        if problem := self._write():
            if not self.has_warned:
                self.has_warned = True
                self.say(
                    f"{problem}; training goes on, its events wait in memory\n"
                    "  fix: free space or raise the quota there, and they are written after all"
                )
            if len(self.waiting) > MOST_WAITING:
                self.waiting.popleft()
                self.num_lost += 1
        return written

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
