"""Memory that a process shares with its children by file descriptor: having no name, it cannot be left behind.

Unlike multiprocessing.shared_memory it needs no tracker process and no room in /dev/shm, which containers keep small.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

ALIGNMENT = 64

Places = Sequence[tuple[str, str, Sequence[int], int]]
"""Name, dtype, shape and offset of each array in a memory; survives JSON."""


class AnonymousMemory:
    """Memory behind a descriptor; grows, never shrinks. Each process has its own object over the same descriptor."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.mapping: mmap.mmap | None = None

    @classmethod
    def create(cls) -> AnonymousMemory:
        """New memory; children get it when they are given its descriptor."""
        if hasattr(os, "memfd_create"):
            return cls(os.memfd_create("hpctrain"))
        with tempfile.TemporaryFile() as file:  # a Python built against an old C library, as conda's are
            return cls(os.dup(file.fileno()))

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
