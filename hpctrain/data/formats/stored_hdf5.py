"""HDF5 files read directly from object stores, through a file object that fetches and caches blocks."""

from __future__ import annotations

import fnmatch
import gc
import io
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import h5py
import numpy as np
from numpy.typing import NDArray

from hpctrain.data.formats.away import noticing, patiently
from hpctrain.data.formats.block_cache import BlockCache, DiskCache
from hpctrain.data.formats.hdf5_arrays import Box, check_end, slices
from hpctrain.data.formats.hdf5_files import LinkedFiles
from hpctrain.data.formats.segments import SEGMENT_BYTES, Segment, Segments
from hpctrain.data.formats.tables import checksum
from hpctrain.data.samples import grouped
from hpctrain.errors import UserError, foreign_errors
from hpctrain.system.object_store import opened, shortened

T = TypeVar("T")

BLOCK_BYTES = 8 * 2**20
"""Size of a request, large because object stores have a high latency."""
BLOCKS_AT_ONCE = 8
"""Blocks to read ahead if the block before them is cached, which suggests sequential reading."""


class StoredFile(io.RawIOBase):
    """An object in a store as a read-only file; it is an error if the object is replaced after it was opened."""

    def __init__(self, url: str, cache: BlockCache) -> None:
        self.url = url
        self.segments = Segments(cache, DiskCache.of_node())
        self.position = 0
        folder, _, self.name = url.rpartition("/")
        with asking(url):
            self.store = opened(folder)
            found = patiently(lambda: self._ask(lambda: self.store.head(self.name)))
        self.size, self.mark = int(found["size"]), found["e_tag"] or found["last_modified"]
        self.condition = {"if_match" if found["e_tag"] else "if_unmodified_since": self.mark}

    @property
    def segment_bytes(self) -> int:
        """Size of each segment but the last; smaller without a disk cache."""
        return BLOCK_BYTES if self.segments.disk is None else SEGMENT_BYTES

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.size}[whence]
        return self.position

    def tell(self) -> int:
        return self.position

    def readinto(self, buffer: Any) -> int:
        out = memoryview(buffer).cast("B")
        count = max(0, min(len(out), self.size - self.position))
        collects = gc.isenabled()
        gc.disable()  # a collection in a fetching thread could block on the library's lock, which the caller holds
        try:
            self.segments.read(lambda: self.copy(self.position, out[:count]))
        finally:
            if collects:
                gc.enable()
        self.position += count
        return count

    def copy(self, begin: int, out: memoryview) -> None:
        """Fill ``out`` with the bytes from ``begin`` on."""
        size, end = self.segment_bytes, begin + len(out)
        for number in range(begin // size, -(-end // size)):
            first, last = max(begin - number * size, 0), min(end - number * size, size)
            segment = self.segment(number, size, partial(np.arange, first // BLOCK_BYTES, -(-last // BLOCK_BYTES)))
            place = number * size + first - begin
            out[place : place + last - first] = memoryview(segment.content)[first:last]

    def segment(self, number: int, size: int, blocks: Callable[[], NDArray[np.int64]]) -> Segment:
        """A segment that has these blocks, given in ascending order; reads ahead if access appears sequential."""
        begin = number * size
        length = min(size, self.size - begin)

        def wanted(marks: NDArray[np.uint8]) -> NDArray[np.int64]:
            numbers = blocks()
            first = int(numbers[0])
            if marks[numbers].all() or not first or not marks[first - 1]:
                return numbers
            return np.union1d(numbers, np.arange(first, min(first + BLOCKS_AT_ONCE, len(marks))))

        def fetch(block: int) -> list[tuple[int, memoryview]]:
            place = block * BLOCK_BYTES
            end = min(place + BLOCK_BYTES, length)
            return [(place, memoryview(self._fetch(begin + place, begin + end)))]

        key = f"{self.url} {self.mark} {begin} {length}"
        return self.segments.get(key, length, -(-length // BLOCK_BYTES), wanted, fetch)

    def _fetch(self, begin: int, end: int) -> bytes:
        def content() -> bytes:
            found = bytes(self.store.get(self.name, options={"range": (begin, end), **self.condition}).bytes())
            if len(found) < end - begin:
                raise EOFError(f"the store gave {len(found)} bytes in place of {end - begin}")
            return found

        with asking(self.url):
            return patiently(lambda: self._ask(content))

    def _ask(self, ask: Callable[[], T]) -> T:
        with noticing(self.url, remote=True):
            return ask()


@dataclass(eq=False)
class StoredArray:
    """An array in NumPy's layout in an object: samples are copied from blocks, without the HDF5 library."""

    file: StoredFile
    begin: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    layout: str = "contiguous"
    chunk_samples: int = 1

    @property
    def sample_bytes(self) -> int:
        """Bytes of one sample."""
        return self.dtype.itemsize * math.prod(self.shape[1:])

    def take(self, indices: NDArray[np.int64]) -> NDArray[Any]:
        """The samples at these indices, as a new array."""
        taken = self.file.segments.read(lambda: self._take(indices, self.file.segment_bytes))
        return taken.astype(self.dtype.newbyteorder("="), copy=False)

    def _take(self, indices: NDArray[np.int64], size: int) -> NDArray[Any]:
        """Read the samples from segments of this size."""
        if len(indices):
            least, most = self._segments(0, self.shape[0] - 1, size)
            if least != most:
                least, most = self._segments(indices.min(), indices.max(), size)
            if least == most:
                return self._within(int(least), size, indices)
        out = np.empty((len(indices), *self.shape[1:]), self.dtype)
        numbers, ends = self._segments(indices, indices, size)
        for number, rows in grouped(np.where(ends == numbers, numbers, -1)):
            if number >= 0:
                out[rows] = self._within(number, size, indices[rows])
                continue
            for row in rows.tolist():
                begin = self.begin + int(indices[row]) * self.sample_bytes
                self.file.copy(begin, out[row : row + 1].data.cast("B"))
        return out

    def _segments(self, first: Any, last: Any, size: int) -> tuple[Any, Any]:
        """Numbers of the segments in which samples ``first`` begin and ``last`` end."""
        begin, end = (self.begin + each * self.sample_bytes for each in (first, last + 1))
        return begin // size, (end - 1) // size

    def _within(self, number: int, size: int, indices: NDArray[np.int64]) -> NDArray[Any]:
        """Read samples that are entirely in one segment."""

        def blocks() -> NDArray[np.int64]:
            begins = self.begin - number * size + indices * self.sample_bytes
            offsets = [*range(0, self.sample_bytes, BLOCK_BYTES), self.sample_bytes - 1]
            return np.unique(np.add.outer(begins, offsets) // BLOCK_BYTES)

        segment = self.file.segment(number, size, blocks)
        first = max(0, -((self.begin - number * size) // self.sample_bytes))  # first sample that begins in the segment
        skipped = self.begin - number * size + first * self.sample_bytes
        count = (min(size, self.file.size - number * size) - skipped) // self.sample_bytes
        samples = segment.array((count, *self.shape[1:]), self.dtype, skipped)
        return samples.take(indices - first, axis=0)

    def read(self, box: Box) -> NDArray[Any]:
        rows, *others = box
        return self.take(np.asarray(rows))[slices((range(len(rows)), *others))]


class StoredFiles(LinkedFiles):
    """A dataset's file in an object store; links to other files are not supported."""

    def __init__(self, url: str, cache: BlockCache) -> None:
        super().__init__(url)
        self.file = StoredFile(url, cache)
        sum_of_file = checksum([(url, self.file.size, self.file.mark)])
        self.origin = {"kind": "hdf5", "uri": url, "files": 1, "files_sha256": sum_of_file}

    def root(self) -> h5py.File:
        if not self.opened:
            self.opened[Path(self.file.url)] = h5py.File(self.file, "r")
        return next(iter(self.opened.values()))

    def contiguous(self, dataset: h5py.Dataset, begin: int, end: int) -> StoredArray:
        check_end(self.path, self.file.size, end)
        return StoredArray(self.file, begin, dataset.shape, dataset.dtype)

    def locate(self, owner: h5py.File, name: str, what: str) -> NoReturn:
        raise UserError(
            f"{self.path}: {what} leads to the file {name}, which is not supported for files in a store",
            "copy its values into the file, or the files to a disk of the cluster",
        )


def files_of(path: Path | str, cache: BlockCache, outside: Sequence[str | Path] = ()) -> LinkedFiles:
    """The LinkedFiles of a path or of an object's URL."""
    return StoredFiles(str(path), cache) if "://" in str(path) else LinkedFiles(Path(path), outside)


def matching(url: str) -> list[str]:
    """URLs of the objects that match a pattern, sorted. Raises UserError if there are none."""
    folder, _, pattern = url.rpartition("/")
    with asking(url):
        names = [str(it["path"]).rpartition("/")[2] for it in opened(folder).list_with_delimiter()["objects"]]
    found = sorted(fnmatch.filter(names, pattern))
    if not found:
        raise UserError(f"no object matches {url}", "correct the pattern of the data")
    return [f"{folder}/{name}" for name in found]


def asking(url: str) -> AbstractContextManager[None]:
    """Turn errors of the store, its library and credential providers, which share no base class, into UserErrors."""

    def said(error: Exception) -> UserError:
        from obstore.exceptions import PreconditionError

        if isinstance(error, FileNotFoundError):
            return UserError(f"{url} does not exist", "correct the address of the data")
        if isinstance(error, PreconditionError):
            return UserError(f"{url} has changed since the run opened it", "do not change data during a run")
        fix = "check the address, the connection to the store, and the credentials that its library uses"
        return UserError(f"{url} cannot be read: {shortened(error)}", fix)

    return foreign_errors(said)
