"""Files that someone else may have put there, such as those of a run folder: read in bounded time and memory, or not.

A pipe would have its reader wait for ever, a device is not a file, a small text may stand for gigabytes of objects.
Every reader of run folders and run files reads through here.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MOST_BYTES = 64 << 20
"""Of a file that is read whole; the last words of 100,000 ranks take 45 MB."""
MOST_VALUES = 4_000_000
"""Of a JSON text, some 0.5 GB of objects; three bytes of text can be one of 72 bytes."""
LINE_BYTES = 8 << 20
"""Length from which on what has no line end is not a line; an event that names 100,000 hosts takes 3 MB."""
MOST_LINES_BYTES = 4 << 30
"""Of a file that is read line by line: 14 million events."""
BLOCK_BYTES = 1 << 20

KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


class NotPlain(OSError):
    """A folder, pipe, socket or device in place of a plain file."""


class TooLarge(OSError):
    """More bytes than such a file can have."""


def open_plain(path: Path | str) -> int:
    """A descriptor for reading a plain file, or the one that a link leads to. Never waits for a pipe's other end.

    Raises:
        NotPlain: it is something else.
        OSError: it is missing, or may not be read.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        kind = next((name for check, name in KINDS if check(mode)), "something else")
        raise NotPlain(errno.EINVAL, f"it is {kind}, not a plain file", str(path))
    return handle


def read(path: Path | str, most_bytes: int = MOST_BYTES) -> bytes:
    """The content of a plain file.

    Raises:
        TooLarge: it has more bytes.
        OSError: see ``open_plain``.
    """
    content = head(path, most_bytes + 1)
    if len(content) > most_bytes:
        raise TooLarge(errno.EFBIG, f"it has more than {most_bytes} bytes", str(path))
    return content


def head(path: Path | str, most_bytes: int) -> bytes:
    """The beginning of a plain file. Raises as ``open_plain`` does."""
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
    """The value in a JSON file. Raises as ``read`` and ``parse_json`` do."""
    return parse_json(read(path, most_bytes))


def parse_json(content: bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is not JSON, nested without end, or more than MOST_VALUES values.
    """
    # With that many, counting costs little compared with parsing; marks inside strings count too.
    if len(content) > MOST_VALUES and sum(map(content.count, (b",", b"[", b"{"))) > MOST_VALUES:
        raise ValueError(f"more than {MOST_VALUES} values")
    try:
        return json.loads(content)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def lines(path: Path | str) -> Iterator[bytes]:
    """The lines of a plain file; those that are too long, and what lies beyond MOST_LINES_BYTES, are left out.

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
