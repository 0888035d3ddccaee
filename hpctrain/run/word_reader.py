"""Last words, looked at again and again: reads what is new or has changed, and not more than so much at a time."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.run.documents import MOST_WORD_BYTES, is_word
from hpctrain.run.last_words import LastWord
from hpctrain.system import safe_read

HEAD_BYTES = 2048
"""A word without a traceback is shorter; the rest of its file is blank."""
READ_BYTES_A_LOOK = 8 << 20
"""After that much the remaining files wait for the next look."""
SETTLED_S = 2.0
"""A file that was written later than this may change again within the resolution of its time stamp."""

Stamp = tuple[int, int]


@dataclass(frozen=True)
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
        words = [seen.word for seen in self.seen.values()]
        return sorted(words, key=lambda word: (word.rank is None, word.rank or 0))

    def _take(self, entry: os.DirEntry[str], stamp: Stamp) -> None:
        """Reads a file. What cannot be read now keeps its earlier word."""
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            saved = self._read(entry.path)
            if is_word(saved):
                settled = time.time() - stamp[0] / 1e9 > SETTLED_S
                self.seen[entry.name] = Seen(stamp if settled else None, LastWord.from_json(saved))

    def _read(self, path: str) -> Any:
        """A file's JSON; the blanks after it are left out."""
        content = safe_read.head(path, HEAD_BYTES)
        self.bytes_read += len(content)
        with contextlib.suppress(ValueError):
            return safe_read.parse_json(content)
        content = safe_read.read(path, MOST_WORD_BYTES)
        self.bytes_read += len(content)
        return safe_read.parse_json(content)
