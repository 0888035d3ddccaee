"""A shard in a file of the node's memory: the state is copied into the file itself, which then only gets its name.

So a tier in memory holds one copy besides the one that is being filled, and writes nothing twice.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hpctrain.checkpoint.format.files import write_at
from hpctrain.checkpoint.format.paced_write import BLOCK_BYTES, Dropped
from hpctrain.checkpoint.format.shard import ShardImage, Skeleton


class SealedImage(ShardImage):
    """A shard's image in a file, which ``write`` gives a second name; to be filled again when that one is not needed.

    Args:
        plan: of the shard.
        allocate: as ``HostMemory.staging``.
        file: replaced if it exists.
        mode: permissions, of which the process' mask is taken.

    Raises:
        OSError: there is no room.
    """

    keeps = True

    def __init__(self, plan: Skeleton, allocate: Callable[..., NDArray[np.uint8]], file: Path, mode: int) -> None:
        self.file = file
        file.unlink(missing_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self.descriptor = os.open(file, flags, mode)
        weakref.finalize(self, os.close, self.descriptor)
        os.posix_fallocate(self.descriptor, 0, plan.num_bytes)
        memory = mmap.mmap(self.descriptor, plan.num_bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        super().__init__(plan, lambda num_bytes: allocate(num_bytes, np.frombuffer(memory, np.uint8)))

    def write(self, path: Path, is_dropped: Callable[[], bool] = lambda: False, mode: int = 0o666) -> None:
        """Sums the file up, adds its index, and gives it its name. Raises OSError, Dropped."""
        size = self.buffer.size
        for number, begin in enumerate(range(0, size, BLOCK_BYTES)):
            if is_dropped():
                raise Dropped("its writer was asked to stop", "nothing is to be done")
            self.sums.add(number, begin, min(size, begin + BLOCK_BYTES))
        write_at(self.descriptor, memoryview(self._index(path.name)), size)
        os.fsync(self.descriptor)
        os.link(self.file, path)
