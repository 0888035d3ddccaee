"""Memory that processes of one node share: by a path among ranks, by a file descriptor with children.

All of it is allocated when it is made: lack of space is an error there, not a bus error later.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

FOLDER = "/dev/shm"
ALIGNMENT = 64
Ranges = Iterable[tuple[int, int]]
"""Offset and length of parts of a memory, in bytes."""

Places = Sequence[tuple[str, str, Sequence[int], int]]
"""Name, dtype, shape and offset of each array in a memory; survives JSON."""


def create(ranges: Ranges, folder: str | None) -> tuple[int, str]:
    """Makes memory that other processes of this user attach to; its descriptor and path.

    The caller unlinks the path once all have attached: mappings keep it alive, and nothing is left behind.

    Args:
        ranges: what this process allocates, so that it lies near its core.
        folder: a memory file system; None takes the folder for temporary files.

    Raises:
        OSError: there is no such folder, or no room in it.
    """
    handle, path = tempfile.mkstemp(prefix="hpctrain-", dir=folder)
    try:
        return _allocated(handle, ranges), path
    except OSError:
        os.unlink(path)
        raise


def attach(path: str, ranges: Ranges = ()) -> int:
    """Descriptor of memory that another process has made; ``ranges`` are allocated by this one. Raises OSError."""
    return _allocated(os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC), ranges)


def _allocated(handle: int, ranges: Ranges) -> int:
    try:
        for offset, length in ranges:
            os.posix_fallocate(handle, offset, length)
    except OSError:
        os.close(handle)
        raise
    return handle


def unnamed_file() -> int:
    """Descriptor of an empty file in memory, which ends with the last descriptor of it."""
    with suppress(AttributeError, OSError):  # a Python built against an old C library, as conda's are; a strict system
        return os.memfd_create("hpctrain")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class AnonymousMemory:
    """Memory behind a descriptor, which children inherit: having no name, it cannot be left behind.

    Grows, never shrinks. Each process has its own object over the same descriptor. Unlike multiprocessing.shared_memory
    it needs no tracker process and no room in /dev/shm, which containers keep small.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.mapping: mmap.mmap | None = None

    @classmethod
    def create(cls) -> AnonymousMemory:
        """New memory; children get it when they are given its descriptor."""
        return cls(unnamed_file())

    def put(self, arrays: Mapping[str, NDArray[Any]]) -> Places:
        """Copies the arrays in, over what is there, and says where they are."""
        places, offset = [], 0
        for name, array in arrays.items():
            places.append((name, array.dtype.str, array.shape, offset))
            offset += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        for name, view in self.views(places).items():
            view[...] = arrays[name]
        return places

    def views(self, places: Places) -> dict[str, NDArray[Any]]:
        """The arrays at these places: writable, and changed by the next ``put`` of any process."""
        ends = (offset + np.dtype(dtype).itemsize * math.prod(shape) for _, dtype, shape, offset in places)
        size = max([1, *ends])
        if self.mapping is None or len(self.mapping) < size:
            if os.fstat(self.descriptor).st_size < size:
                os.ftruncate(self.descriptor, size)
            self.mapping = mmap.mmap(self.descriptor, os.fstat(self.descriptor).st_size)
        return {name: np.ndarray(shape, dtype, self.mapping, offset) for name, dtype, shape, offset in places}

    def close(self) -> None:
        """Gives it up; the memory is freed when all processes have."""
        self.mapping = None
        os.close(self.descriptor)
