"""HDF5 arrays by how they are read: memory-mapped, through the library, or assembled from other arrays."""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import h5py
import numpy as np
from numpy.typing import NDArray

from hpctrain.errors import UserError

Box = tuple[range, ...]
"""Ascending indices along each axis, at least one along the first."""


def slices(box: Box) -> tuple[slice, ...]:
    """The box as an index of slices."""
    return tuple(slice(indices.start, indices.stop, indices.step) for indices in box)


def boxes_of(space: h5py.h5s.SpaceID, shape: tuple[int, ...]) -> list[Box]:
    """A selection as boxes in ascending order along the first axis; empty if it does not have that form."""
    if space.get_select_type() == h5py.h5s.SEL_ALL:
        return [tuple(map(range, shape))]
    if space.get_select_type() != h5py.h5s.SEL_HYPERSLABS or space.get_simple_extent_ndims() != len(shape):
        return []
    if space.is_regular_hyperslab():
        axes = map(progression, *space.get_regular_hyperslab(), shape)
        box = tuple(indices for indices in axes if indices is not None)
        if len(box) == len(shape):
            return [box]
    blocks = np.array(space.get_select_hyper_blocklist(), dtype=np.int64)  # [blocks, first and last, axes]
    blocks = blocks[np.argsort(blocks[:, 0, 0], kind="stable")]
    if (blocks[:, :, 1:] != blocks[:1, :, 1:]).any() or (blocks[1:, 0, 0] <= blocks[:-1, 1, 0]).any():
        return []
    others = [range(first, last + 1) for first, last in blocks[0, :, 1:].T.tolist()]
    return [(range(first, last + 1), *others) for first, last in blocks[:, :, 0].tolist()]


def aligned(targets: list[Box], sources: list[Box]) -> Iterator[tuple[Box, Box]]:
    """Split two selections into pairs of boxes with equal numbers of samples, up to the end of the shorter one."""
    if len(targets) == len(sources) == 1:
        yield targets[0], sources[0]
        return
    sides = deque(targets), deque(sources)
    while all(sides):
        count = min(len(side[0][0]) for side in sides)
        target, source = (side.popleft() for side in sides)
        yield (target[0][:count], *target[1:]), (source[0][:count], *source[1:])
        for side, (rows, *others) in zip(sides, (target, source), strict=True):
            if rows[count:]:
                side.appendleft((rows[count:], *others))


def progression(start: int, stride: int, count: int, block: int, size: int) -> range | None:
    """The indices that a hyperslab selects along one axis of this size; None if they are not evenly spaced."""
    endless = h5py.h5s.UNLIMITED
    if block == 1 and count > 1 and stride > 1:
        return range(start, size if count == endless else start + stride * (count - 1) + 1, stride)
    if endless in (count, block):
        return range(start, size) if count == 1 or stride == block else None
    return range(start, start + count * block) if count == 1 or stride == block else None


def beyond(box: Box, shape: tuple[int, ...]) -> bool:
    """Whether a box extends beyond an array of this shape."""
    return any(indices and indices[-1] >= size for indices, size in zip(box, shape, strict=True))


class Array(Protocol):
    """An HDF5 array that can be read box by box."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...
    @property
    def layout(self) -> str:
        """Storage layout, for display."""

    @property
    def chunk_samples(self) -> int:
        """Number of samples that are best read together."""

    def read(self, box: Box) -> NDArray[Any]:
        """Read the values in a box of the array; raises OSError or UserError."""


@dataclass(frozen=True)
class MappedBytes:
    """A byte range of a memory-mapped file. Access beyond the file's end would kill the process with SIGBUS."""

    path: Path
    mapping: mmap.mmap
    begin: int
    end: int

    def check(self) -> None:
        """Raise UserError if the file has become too short."""
        check_end(self.path, self.mapping.size(), self.end)


def check_end(path: Path | str, num_bytes: int, end: int) -> None:
    """Raise UserError if a file of ``num_bytes`` bytes is shorter than ``end``."""
    if num_bytes < end:
        fix = "copy or make it again, and do not change data during a run"
        raise UserError(f"{path} is truncated: it has {num_bytes} bytes in place of at least {end}", fix)


class MappedArray:
    """A memory-mapped array in NumPy's layout."""

    layout = "contiguous"
    chunk_samples = 1

    def __init__(self, where: MappedBytes, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.where, self.shape, self.dtype = where, shape, dtype
        self.array = np.ndarray(shape, dtype, where.mapping, where.begin)

    def take(self, indices: NDArray[np.int64]) -> NDArray[Any]:
        """The samples at these indices, as a new array."""
        self.where.check()
        return self.array.take(indices, axis=0).astype(self.dtype.newbyteorder("="), copy=False)

    def read(self, box: Box) -> NDArray[Any]:
        self.where.check()
        return self.array[slices(box)]


class LibraryArray:
    """An array that only the HDF5 library can read: chunked, compressed, or of a number type unknown to NumPy."""

    def __init__(self, dataset: h5py.Dataset) -> None:
        self.dataset = dataset
        self.shape: tuple[int, ...] = dataset.shape or ()
        self.dtype: np.dtype[Any] = dataset.dtype

    @property
    def layout(self) -> str:
        if not self.dataset.chunks:
            return "not mappable"
        chunks = f"chunks of {' x '.join(map(str, self.dataset.chunks))}"
        return f"{chunks}, {self.dataset.compression}" if self.dataset.compression else chunks

    @property
    def chunk_samples(self) -> int:
        return int(self.dataset.chunks[0]) if self.dataset.chunks else 1

    def read(self, box: Box) -> NDArray[Any]:
        values: NDArray[Any] = self.dataset[slices(box)]
        return values


@dataclass(frozen=True)
class FileSegment:
    """A box of a virtual array and the box of the source array that holds its values, in the same order."""

    target: Box
    source: Box
    array: Array

    def cut(self, begin: int, end: int) -> tuple[range, Box]:
        """The samples from ``begin`` to ``end - 1`` that it covers, and their box in the source."""
        rows = self.target[0]
        least, most = (min(max(-(-(bound - rows.start) // rows.step), 0), len(rows)) for bound in (begin, end))
        axis = next((axis for axis, indices in enumerate(self.source) if len(indices) > 1), None)
        if len(rows) == 1 or axis is None:
            return rows[least:most], self.source
        part = self.source[axis][least:most]
        return rows[least:most], (*self.source[:axis], part, *self.source[axis + 1 :])


class VirtualArray:
    """An array assembled from pieces of others; parts of a sample that no piece covers have the fill value."""

    layout = "virtual"

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any], fill: Any, pieces: Sequence[FileSegment]) -> None:
        self.shape = shape
        self.dtype = dtype
        self.fill = fill
        self.pieces = pieces
        self.firsts = np.array([piece.target[0][0] for piece in pieces])
        self.lasts = np.array([piece.target[0][-1] for piece in pieces])
        chunks = (piece.array.chunk_samples for piece in pieces if len(piece.target[0]) > 1)
        self.chunk_samples = max(chunks, default=1)

    def read(self, box: Box) -> NDArray[Any]:
        begin, end = box[0][0], box[0][-1] + 1
        values = np.full((end - begin, *self.shape[1:]), self.fill, self.dtype)
        covered = np.zeros(end - begin, dtype=bool)
        for index in np.flatnonzero((self.firsts < end) & (self.lasts >= begin)).tolist():
            piece = self.pieces[index]
            rows, source = piece.cut(begin, end)
            if rows:
                target = (range(rows[0] - begin, rows[-1] - begin + 1, rows.step), *piece.target[1:])
                values[slices(target)] = piece.array.read(source).reshape([len(indices) for indices in target])
                covered[slices(target[:1])] = True
        if not covered.all():
            raise OSError(f"no source is named for sample {begin + int(covered.argmin())}")
        return values[slices((range(0, end - begin, box[0].step), *box[1:]))]
