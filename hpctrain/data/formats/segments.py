"""Segments of remote data, cached on the node's disk or in memory and filled piece by piece on demand."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.formats.block_cache import MAPPED_BYTES, BlockCache, DiskCache, alone
from hpctrain.errors import UserError
from hpctrain.system.files import replacement

PIECES_AT_ONCE = 8
"""Pieces fetched concurrently, because object stores have a high latency."""
SEGMENT_BYTES = 2**30
"""Size of a segment's sparse file on the node's disk; only cached pieces take space."""
MOST_MAPPED = 16
"""Limit on full-size segments that a process maps: a mapped file takes disk space even after it is removed."""

Read = TypeVar("Read")
Wanted = Callable[[NDArray[np.uint8]], NDArray[np.int64]]
"""wanted(marks) returns the numbers of the pieces needed."""
Make = Callable[[int], Iterable[tuple[int, memoryview]]]
"""make(piece) returns the piece's content as (offset in the segment, bytes) pairs."""


@dataclass(frozen=True)
class Segment:
    """Bytes in a file or in memory, followed by one mark per piece: 1 if the piece is cached."""

    path: Path | None
    """None for a segment in memory, as is the handle."""
    handle: int | None
    content: mmap.mmap | bytearray
    marks: NDArray[np.uint8]
    """A view of the content, which also shows pieces that other ranks have written to the file."""
    nbytes: int
    """Size attributed to it in the memory cache."""

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any], begin: int) -> NDArray[Any]:
        """View the content from ``begin`` on as an array."""
        return np.ndarray(shape, dtype, self.content, begin)

    def put(self, piece: int, parts: Iterable[tuple[int, memoryview]]) -> None:
        """Write a piece, and mark it once it is on disk. Raises OSError."""
        mark = len(self.content) - len(self.marks) + piece, memoryview(b"\1")
        if self.handle is None:
            for place, content in (*parts, mark):
                memoryview(self.content)[place : place + len(content)] = content
            return
        for place, content in parts:
            if os.pwrite(self.handle, content, place) < len(content):
                raise OSError(errno.ENOSPC, "the disk is full")
        os.fdatasync(self.handle)
        os.pwrite(self.handle, mark[1], mark[0])


@dataclass(eq=False)
class Segments:
    """The segments of one file or table."""

    cache: BlockCache
    disk: DiskCache | None
    """None to keep them in memory."""

    def read(self, read: Callable[[], Read]) -> Read:
        """Call ``read``; if it raises OSError with the disk cache, such as on a full disk, call it again without."""
        try:
            return read()
        except OSError:
            if self.disk is None:
                raise
            self.disk = None
            return read()

    def get(self, key: str, length: int, count: int, wanted: Wanted, make: Make) -> Segment:
        """A segment that has the wanted pieces; missing ones are made concurrently.

        Args:
            key: identifies the segment's content.
            length: length in bytes.
            count: number of pieces.
            wanted: called if any piece is missing.
            make: makes a piece; may be called in a thread.
        """
        name = key if self.disk else f"{key} in memory"
        segment = self.cache.get(name, lambda: self._open(key, length, count))
        if not segment.marks.all():
            pieces = [each for each in wanted(segment.marks).tolist() if not segment.marks[each]]
            if len(pieces) == 1:
                self._make(segment, pieces[0], make)
            elif pieces:
                with ThreadPoolExecutor(PIECES_AT_ONCE) as threads:
                    list(threads.map(lambda piece: self._make(segment, piece, make), pieces))
        return segment

    def _make(self, segment: Segment, piece: int, make: Make) -> None:
        """Make a piece unless another rank does."""
        with contextlib.ExitStack() as stack:
            if segment.path is not None:
                lock = Path(f"{segment.path}.{piece}.lock")
                stack.enter_context(alone(lock))
                stack.callback(lock.unlink, missing_ok=True)
            if not segment.marks[piece]:
                segment.put(piece, make(piece))
                if self.disk:
                    self.disk.make_room()

    def _open(self, key: str, length: int, count: int) -> Segment:
        def write(path: Path) -> None:
            with replacement(path) as temporary:
                os.truncate(temporary, length + count)

        def mapped(path: Path) -> Segment:
            handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            with contextlib.ExitStack() as stack:
                stack.callback(os.close, handle)
                if os.fstat(handle).st_size != length + count:
                    raise UserError(f"{path} is damaged", "remove it")
                content = mmap.mmap(handle, 0, prot=mmap.PROT_READ)  # duplicates the descriptor
                nbytes = max(2 * MAPPED_BYTES, self.cache.limit_bytes * length // (MOST_MAPPED * SEGMENT_BYTES))
                segment = Segment(path, handle, content, np.frombuffer(content, np.uint8, count, length), nbytes)
                weakref.finalize(segment, stack.pop_all().close)
            return segment

        if self.disk:
            node = os.uname().nodename  # on a shared disk, another node's marks may become visible before its bytes
            return self.disk.get(f"{node} {key}", write, mapped)
        memory = bytearray(length + count)
        return Segment(None, None, memory, np.frombuffer(memory, np.uint8, count, length), length)
