"""HDF5 arrays by how they are read: memory-mapped, or through the library in aligned blocks."""

from __future__ import annotations

import contextlib
import math
import mmap
import resource
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpctrain.data.dataset import Field
from hpctrain.data.formats.away import retry_local
from hpctrain.data.formats.block_cache import BlockCache
from hpctrain.data.samples import grouped
from hpctrain.errors import UserError
from hpctrain.system.array_types import Array, Ints

BLOCK_BYTES = 64 * 2**10
"""Minimum size of a read from an array that is not contiguous."""
ADVISED_BYTES = 128 * 2**10
"""Linux may cut advice about more bytes down to a file system's read-ahead window, by default this large."""


@dataclass(eq=False)
class MappedArray:
    """A memory-mapped array in NumPy's layout. Access beyond the file's end would kill the process with SIGBUS."""

    path: Path
    mapping: mmap.mmap
    begin: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    layout: str = "contiguous"
    is_cold: bool = False
    """Whether samples had to wait for the disk, so far."""

    @cached_property
    def array(self) -> Array:
        """The array in the file's bytes."""
        return np.ndarray(self.shape, self.dtype, self.mapping, self.begin)

    def take(self, indices: Ints) -> Array:
        """The samples at these indices, as a new array; raises UserError if the file has become too short."""
        self.check()
        if self.is_cold:
            self._fetch(indices)
        faults = disk_faults()
        taken = self.array.take(indices, axis=0).astype(self.dtype.newbyteorder("="), copy=False)
        self.is_cold = self.is_cold or disk_faults() > faults
        return taken

    def _fetch(self, indices: Ints) -> None:
        """Have the system read these samples all at once: the copy waits for one page after the other."""
        num_bytes = self.array[:1].nbytes
        for begin in (self.begin + indices * num_bytes).tolist():
            for page in range(begin - begin % mmap.PAGESIZE, begin + num_bytes, ADVISED_BYTES):
                with contextlib.suppress(OSError, ValueError):  # it is advice: the copy reports a real error
                    self.mapping.madvise(mmap.MADV_WILLNEED, page, min(ADVISED_BYTES, begin + num_bytes - page))

    def check(self) -> None:
        """Raise UserError if the file has become too short."""
        num_bytes = self.mapping.size()
        end = self.begin + self.dtype.itemsize * math.prod(self.shape)
        if num_bytes < end:
            fix = "copy or make it again, and do not change data during a run"
            raise UserError(f"{self.path} is truncated: it has {num_bytes} bytes in place of at least {end}", fix)


def disk_faults() -> int:
    """How often this thread has waited for a page of a mapped file that was not in memory."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_majflt


@dataclass(eq=False)
class BlockArray:
    """An array that is slow to read by sample (chunked, compressed): reads and caches aligned blocks."""

    path: Path
    name: str
    dataset: h5py.Dataset
    field: Field
    cache: BlockCache

    @property
    def layout(self) -> str:
        """Storage layout, for display."""
        if not self.dataset.chunks:
            return "not mappable"
        chunks = f"chunks of {' x '.join(map(str, self.dataset.chunks))}"
        return f"{chunks}, {self.dataset.compression}" if self.dataset.compression else chunks

    @cached_property
    def block_samples(self) -> int:
        """Samples per block: a multiple of the chunk's, with at least BLOCK_BYTES in total."""
        chunk = int(self.dataset.chunks[0]) if self.dataset.chunks else 1
        return chunk * math.ceil(BLOCK_BYTES / max(1, chunk * self.field.num_bytes))

    def take(self, indices: Ints) -> Array:
        """See ``NetcdfReader``."""
        out = np.empty((len(indices), *self.field.shape), self.field.dtype)
        for block, rows in grouped(indices // self.block_samples):
            out[rows] = self._block(block)[indices[rows] - block * self.block_samples]
        return out

    def _block(self, block: int) -> Array:
        return self.cache.get((self.path, self.name, block), lambda: self._read(block * self.block_samples))

    def _read(self, begin: int) -> Array:
        end = min(begin + self.block_samples, self.dataset.shape[0])
        try:
            values: Any = retry_local(str(self.path), lambda: self.dataset[begin:end])
        except OSError as error:
            what = f"{self.path}: samples {begin} to {end - 1} of {'/' + self.name!r} cannot be read: {error}"
            raise UserError(what, "the file is damaged: make or copy it again") from error
        return np.asarray(values.astype(self.field.dtype, copy=False))
