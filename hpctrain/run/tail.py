"""Repeatedly reads files that other processes write: only what is new, and only if something is new. Never writes.

Files are opened before their size is read: on open, an NFS client asks its server, whereas ``stat`` alone may answer
from a cache that is a minute old.
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
    """Reads the lines of a growing file."""

    path: Path
    offset: int = 0
    """Number of bytes read so far."""
    size: int = 0
    """Size of the file at the last look."""
    restarts: int = 0
    """How often the file was replaced by another one, which is then read from its beginning."""
    _file: tuple[int, int] | None = field(default=None, repr=False)
    _rest: bytes = field(default=b"", repr=False)
    """The incomplete last line."""

    @property
    def is_behind(self) -> bool:
        """Whether the last look left something unread."""
        return self.offset < self.size

    def lines(self, most_bytes: int = READ_BYTES) -> bytes:
        """Returns new complete lines, about ``most_bytes`` in all; empty if there are none, or no file.

        Raises:
            UserError: no permission to read the file.
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
    """Reads a small file with one JSON object that its writer replaces from time to time."""

    path: Path
    interpret: Callable[[Any], Any] = AN_OBJECT
    """Converts the parsed JSON. Raises ValueError if it is not valid content."""
    value: Any = None
    """The last valid content; None before there was any."""
    changed: float | None = None
    """Time of the last change, Unix seconds by the file system's clock; None if there is no file."""
    _version: tuple[int, int, int] | None = field(default=None, repr=False)

    def read(self) -> Any:
        """Returns the content, or the last valid content if the file has vanished or is being written.

        Raises:
            UserError: no permission to read the file.
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
    """Reads at most one block of a file from a position; empty at the end of the file, or if there is none.

    Raises:
        UserError: no permission to read the file.
    """
    with _opened(path) as handle:
        return b"" if handle is None else _read(handle, safe_read.BLOCK_BYTES, position)


def _read(handle: int, count: int, offset: int) -> bytes:
    """Reads bytes; empty on errors such as ESTALE and EIO, which may be gone at the next look."""
    try:
        return os.pread(handle, count, offset)
    except OSError:
        return b""


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int | None]:
    """Opens a file; yields None if it is not a regular file, or the file system cannot open it at the moment."""
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
