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

Described = Sequence[tuple[str, str, Sequence[int], int]]
"""Name, dtype, shape and offset of each array in a memory."""


class SharedMemory:
    """Bytes behind a descriptor; grows, never shrinks. Each process has its own object over the same descriptor."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.mapping: mmap.mmap | None = None

    def view(self, num_bytes: int) -> memoryview:
        """The first ``num_bytes``, writable, valid until a longer view is asked for."""
        if self.mapping is None or len(self.mapping) < num_bytes:
            if os.fstat(self.descriptor).st_size < num_bytes:
                os.ftruncate(self.descriptor, num_bytes)
            self.mapping = mmap.mmap(self.descriptor, os.fstat(self.descriptor).st_size)
        return memoryview(self.mapping)[:num_bytes]

    def close(self) -> None:
        """Gives it up; the memory is freed when all processes have."""
        self.mapping = None
        os.close(self.descriptor)


def create() -> SharedMemory:
    """New shared memory; children get it when they are given its descriptor."""
    if hasattr(os, "memfd_create"):
        return SharedMemory(os.memfd_create("hpctrain-data"))
    with tempfile.TemporaryFile() as file:
        return SharedMemory(os.dup(file.fileno()))


def put(arrays: Mapping[str, NDArray[Any]], memory: SharedMemory) -> Described:
    """Copies the arrays into the memory and says where they are."""
    offsets = np.cumsum([0] + [-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays.values()]).tolist()
    view = memory.view(max(1, offsets[-1]))
    described = []
    for (name, array), offset in zip(arrays.items(), offsets, strict=False):
        np.ndarray(array.shape, array.dtype, view, offset)[...] = array
        described.append((name, array.dtype.str, array.shape, offset))
    return described


def views(described: Described, memory: SharedMemory) -> dict[str, NDArray[Any]]:
    """The arrays that ``put`` describes, in place."""
    ends = (offset + np.dtype(dtype).itemsize * math.prod(shape) for _, dtype, shape, offset in described)
    view = memory.view(max([1, *ends]))
    return {name: np.ndarray(shape, dtype, view, offset) for name, dtype, shape, offset in described}
