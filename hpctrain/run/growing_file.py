"""Files that others write, looked at again and again: only what is new is read, and only when there is something new.

A file is opened before its size is asked for: on opening, an NFS client asks its server; ``stat`` alone would answer
from the client's cache, which may be a minute old. Nothing here writes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpctrain.errors import UserError
from hpctrain.system import safe_read
from hpctrain.system.json_shape import sound

AN_OBJECT = sound(dict)
READ_BYTES = 1 << 20
"""Bytes read at a time."""


@dataclass
class Tail:
    """The lines of a file that grows."""

    path: Path
    offset: int = 0
    """Bytes that have been read; each is read once."""
    size: int = 0
    """Bytes that the file had at the last look."""
    restarts: int = 0
    """How often another file was found in its place, whose lines then come from their beginning."""
    _file: tuple[int, int] | None = field(default=None, repr=False)
    _rest: bytes = field(default=b"", repr=False)
    """The last line as far as it has been written."""

    @property
    def is_behind(self) -> bool:
        """Whether the last look left something unread."""
        return self.offset < self.size

    def lines(self, most_bytes: int = READ_BYTES) -> bytes:
        """Whole new lines, about ``most_bytes`` of them; empty if there are none, or no file.

        Raises:
            UserError: the file may not be read.
        """
        self.size = self.offset  # if nothing can be read this time
        with _opened(self.path) as handle:
            if handle is None:
                return b""
            status = os.fstat(handle)
            self._notice_another(status)
            self.size = min(status.st_size, safe_read.MOST_LINES_BYTES)
            while self.is_behind:
                data = _read(handle, min(most_bytes, self.size - self.offset), self.offset)
                if not data:
                    self.size = self.offset
                    break
                self.offset += len(data)
                whole, end, rest = (self._rest + data).rpartition(b"\n")
                self._rest = rest if len(rest) < safe_read.LINE_BYTES else b""
                if end:
                    return whole + end
        return b""

    def _notice_another(self, status: os.stat_result) -> None:
        file = status.st_dev, status.st_ino
        if self._file not in (None, file) or status.st_size < self.offset:
            self.offset, self._rest = 0, b""
            self.restarts += 1
        self._file = file


@dataclass
class JsonFile:
    """A small file with one JSON object, which its writer replaces now and then."""

    path: Path
    interpret: Callable[[Any], Any] = AN_OBJECT
    """What its reader makes of a value. Raises ValueError for one that cannot be its content."""
    value: Any = None
    """Its last content that was whole; None before there was any."""
    changed: float | None = None
    """When it was last written, Unix seconds by the file system's clock; None while there is no such file."""
    _version: tuple[int, int, int] | None = field(default=None, repr=False)

    def read(self) -> Any:
        """Its content; what was known before if it has vanished or is being written.

        Raises:
            UserError: the file may not be read.
        """
        with _opened(self.path) as handle:
            if handle is None:
                self.changed = self._version = None
                return self.value
            status = os.fstat(handle)
            self.changed = status.st_mtime
            version = status.st_ino, status.st_mtime_ns, status.st_size
            if version == self._version or status.st_size > safe_read.MOST_BYTES:
                return self.value
            if content := _read(handle, status.st_size, 0):
                self._version = version
                with contextlib.suppress(ValueError):
                    self.value = self.interpret(safe_read.parse_json(content))
        return self.value


def read_at(path: Path, position: int) -> bytes:
    """What a growing file has from there on, a block at most; empty where there is nothing more, or no file.

    Raises:
        UserError: the file may not be read.
    """
    with _opened(path) as handle:
        return b"" if handle is None else _read(handle, safe_read.BLOCK_BYTES, position)


def _read(handle: int, count: int, offset: int) -> bytes:
    """Empty if the file system has lost the file for the moment (ESTALE, EIO): it may be back at the next look."""
    try:
        return os.pread(handle, count, offset)
    except OSError:
        return b""


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int | None]:
    """A descriptor; None if there is no plain file, or the file system has lost it for the moment."""
    handle = None
    try:
        handle = safe_read.open_plain(path)
    except PermissionError as error:
        raise UserError(f"{path} may not be read: {error.strerror}", "ask its owner for read permission") from error
    except OSError:
        pass
    try:
        yield handle
    except OSError:  # ESTALE: as above
        if handle is None:
            raise
    finally:
        if handle is not None:
            os.close(handle)
