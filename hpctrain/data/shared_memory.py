"""Memory that a process shares with its children by file descriptor: having no name, it cannot be left behind.

Unlike multiprocessing.shared_memory it needs no tracker process and no room in /dev/shm, which containers keep small.
"""

from __future__ import annotations

import mmap
import os
import tempfile


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
