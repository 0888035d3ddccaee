"""Memory shared by processes of one node: through a path among ranks, through a descriptor with children.

Memory among ranks is allocated up front, so that lack of space raises an error there and not a bus error later.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpctrain.system.array_types import Array

FOLDER = "/dev/shm"
ALIGNMENT = 64
Ranges = Iterable[tuple[int, int]]
"""(offset, length) of parts of a memory, in bytes."""

Places = Sequence[tuple[str, str, Sequence[int], int]]
"""Name, dtype, shape and offset of each array in a memory; JSON-serializable."""


def create(ranges: Ranges, folder: str | None) -> tuple[int, str]:
    """Creates memory to which other processes of this user can attach. Returns its descriptor and path.

    The caller unlinks the path once all have attached: mappings keep the memory alive, and no file is left behind.

    Args:
        ranges: parts that this process allocates, so that they are close to its core.
        folder: a folder on a memory file system; None uses the folder for temporary files.

    Raises:
        OSError: the folder is missing or full.
    """
    handle, path = tempfile.mkstemp(prefix="hpctrain-", dir=folder)
    try:
        return _allocated(handle, ranges), path
    except OSError:
        os.unlink(path)
        raise


def attach(path: str, ranges: Ranges = ()) -> int:
    """Opens memory that another process created, and allocates ``ranges``. Returns its descriptor. Raises OSError."""
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
    """Returns the descriptor of an empty file in memory, which is freed with its last descriptor."""
    with suppress(AttributeError, OSError):  # a Python built against an old C library, as conda's are; a strict system
        return os.memfd_create("hpctrain")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class AnonymousMemory:
    """Memory behind a descriptor that children inherit; it has no name, so it cannot be left behind.

    Grows but never shrinks. Each process has its own object over the same descriptor. Unlike
    multiprocessing.shared_memory it needs no tracker process and no space in /dev/shm, which is small in containers.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.mapping: mmap.mmap | None = None

    @classmethod
    def create(cls) -> AnonymousMemory:
        """Creates new memory; share it by passing its descriptor to children."""
        return cls(unnamed_file())

    def put(self, arrays: Mapping[str, Array]) -> Places:
        """Copies arrays into the memory, overwriting its content; returns their places."""
        places, offset = [], 0
        for name, array in arrays.items():
            places.append((name, array.dtype.str, array.shape, offset))
            offset += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        for name, view in self.views(places).items():
            view[...] = arrays[name]
        return places

    def views(self, places: Places) -> dict[str, Array]:
        """Returns views of the arrays at these places: writable, and overwritten by the next ``put`` of any process."""
        import numpy as np  # here, since launchers use the other functions and are to start quickly

        ends = (offset + np.dtype(dtype).itemsize * math.prod(shape) for _, dtype, shape, offset in places)
        size = max([1, *ends])
        if self.mapping is None or len(self.mapping) < size:
            if os.fstat(self.descriptor).st_size < size:
                os.ftruncate(self.descriptor, size)
            self.mapping = mmap.mmap(self.descriptor, os.fstat(self.descriptor).st_size)
        return {name: np.ndarray(shape, dtype, self.mapping, offset) for name, dtype, shape, offset in places}

    def close(self) -> None:
        """Closes this process's descriptor; the memory is freed when all processes have closed theirs."""
        self.mapping = None
        os.close(self.descriptor)
