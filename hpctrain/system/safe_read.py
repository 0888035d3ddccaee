"""Reads files that others may have written, such as those of a run folder, in bounded time and memory.

A pipe would block its reader forever, a device is not a file, and a small JSON text can expand to gigabytes of objects.
All reads of run folders and run files go through this module.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

MOST_BYTES = 64 << 20
"""Largest file that is read whole; the last words of 100,000 ranks take 45 MB."""
MOST_VALUES = 4_000_000
"""Most values of a JSON text, about 0.5 GB of objects: three bytes of text can become an object of 72 bytes."""
LINE_BYTES = 8 << 20
"""Longest line; an event that names 100,000 hosts takes 3 MB."""
MOST_LINES_BYTES = 4 << 30
"""Largest part read of a file that is read by lines: 14 million events."""
BLOCK_BYTES = 1 << 20

KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


class NotPlain(OSError):
    """A folder, pipe, socket or device in place of a regular file."""


class TooLarge(OSError):
    """A file exceeds the limit of its kind."""


def open_plain(path: Path | str, flags: int = 0) -> int:
    """Opens a regular file for reading, with these further flags; returns its descriptor. Never blocks on a pipe.

    Raises:
        NotPlain: it is something else.
        OSError: it is missing or cannot be read.
    """
    handle = os.open(path, flags | os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        mode = os.fstat(handle).st_mode
        if not stat.S_ISREG(mode):
            kind = next((name for check, name in KINDS if check(mode)), "something else")
            raise NotPlain(errno.EINVAL, f"it is {kind}, not a plain file", str(path))
    except OSError:
        os.close(handle)
        raise
    return handle


def read(path: Path | str, most_bytes: int = MOST_BYTES) -> bytes:
    """Reads a regular file.

    Raises:
        TooLarge: it has more than ``most_bytes``.
        OSError: see ``open_plain``.
    """
    content = head(path, most_bytes + 1)
    if len(content) > most_bytes:
        raise TooLarge(errno.EFBIG, f"it has more than {most_bytes} bytes", str(path))
    return content


def head(path: Path | str, most_bytes: int) -> bytes:
    """Reads the start of a regular file. Raises as ``open_plain`` does."""
    blocks, left = [], most_bytes
    handle = open_plain(path)
    try:
        while left and (block := os.read(handle, min(left, BLOCK_BYTES))):
            blocks.append(block)
            left -= len(block)
    finally:
        os.close(handle)
    return b"".join(blocks)


def read_json(path: Path | str, most_bytes: int = MOST_BYTES) -> Any:
    """Reads a JSON file. Raises as ``read`` and ``parse_json`` do."""
    return parse_json(read(path, most_bytes))


def parse_json(content: bytes) -> Any:
    """Parses a JSON text.

    Raises:
        ValueError: it is not JSON, too deeply nested, or has more than MOST_VALUES values.
    """
    # Counting is cheap compared with parsing; it also counts marks inside strings.
    if len(content) > MOST_VALUES and sum(map(content.count, (b",", b"[", b"{"))) > MOST_VALUES:
        raise ValueError(f"more than {MOST_VALUES} values")
    try:
        return json.loads(content)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def parse_as(read: Callable[[Any], T], content: bytes) -> T | None:
    """Parses a JSON text and reads its value, as ``json_shape.maker`` does; None if it is not valid."""
    try:
        return read(parse_json(content))
    except ValueError:
        return None


def lines(path: Path | str) -> Iterator[bytes]:
    """Yields the lines of a regular file; skips lines that are too long and everything beyond MOST_LINES_BYTES.

    Raises as ``open_plain`` does.
    """
    left = MOST_LINES_BYTES
    with os.fdopen(open_plain(path), "rb") as file:
        whole = True
        while left > 0 and (part := file.readline(LINE_BYTES)):
            left -= len(part)
            ends = part.endswith(b"\n") or len(part) < LINE_BYTES
            if whole and ends:
                yield part
            whole = ends
