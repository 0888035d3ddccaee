"""A shard to write: an image of the HDF5 file in memory, filled in place and written in large blocks.

h5py creates the skeleton once, with contiguous datasets that are allocated at creation and never filled. Every byte of
the file is therefore either metadata, which is the same in every save, or a value at a known offset. A save copies
values to their offsets and writes the image, without calls to the HDF5 library or its lock while training continues.
The shard's index is appended after the HDF5 file.
"""

from __future__ import annotations

import io
import mmap
import os
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpctrain.checkpoint.format import shard_index
from hpctrain.checkpoint.format.durable_files import crc32
from hpctrain.checkpoint.format.layout import ITEM_TYPES, MOST_TILES, TensorPiece
from hpctrain.checkpoint.format.paced_write import write_paced
from hpctrain.system.array_types import Array, Bytes
from hpctrain.system.shared_memory import unnamed_file
from hpctrain.train.state import all_finite

ALIGNMENT_BYTES = 64
"""A cache line, so that arrays can be used in place in the image."""
SUMMED_BYTES = 1 << 20
"""Bytes per checksum, which is also the smallest unit of a large piece that a reader reads and verifies."""
METADATA_BLOCK_BYTES = 1 << 16


@dataclass(frozen=True)
class Skeleton:
    """An HDF5 file without values: the pieces' offsets and all bytes between the pieces."""

    pieces: tuple[TensorPiece, ...]
    offsets: tuple[int, ...]
    num_bytes: int
    between: tuple[tuple[int, bytes], ...]
    """(offset, bytes) of each range that holds no values."""


def skeleton(pieces: Sequence[TensorPiece]) -> Skeleton:
    """Lay out a file for these pieces; the same pieces give the same bytes."""
    link = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    link.set_create_intermediate_group(True)
    create = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    create.set_layout(h5py.h5d.CONTIGUOUS)
    create.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    create.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    create.set_obj_track_times(False)
    with open(unnamed_file(), "w+b", buffering=0) as file:  # takes no memory for values, which are never written
        # Fails early under a file-size limit, which libhdf5 handles badly.
        for size in (sum(piece.num_bytes for piece in pieces), 0):
            file.truncate(size)
        with create_file(file) as target:
            offsets = [create_dataset(target, piece, link, create) for piece in pieces]
        num_bytes = file.seek(0, os.SEEK_END)
        extents = sorted((offset, piece.num_bytes) for offset, piece in zip(offsets, pieces, strict=True))
        between = tuple((begin, os.pread(file.fileno(), end - begin, begin)) for begin, end in gaps(extents, num_bytes))
    return Skeleton(tuple(pieces), tuple(offsets), num_bytes, between)


def create_file(file: io.FileIO) -> h5py.File:
    """Create an HDF5 file without timestamps; h5py.File itself would store one for the root group."""
    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    access.set_fileobj_driver(h5py.h5fd.fileobj_driver, file)
    access.set_libver_bounds(h5py.h5f.LIBVER_V18, h5py.h5f.LIBVER_V18)
    access.set_alignment(1, ALIGNMENT_BYTES)
    access.set_meta_block_size(METADATA_BLOCK_BYTES)
    create = h5py.h5p.create(h5py.h5p.FILE_CREATE)
    create.set_obj_track_times(False)
    return h5py.File(h5py.h5f.create(b"skeleton", h5py.h5f.ACC_TRUNC, create, access))


def create_dataset(target: h5py.File, piece: TensorPiece, link: Any, create: Any) -> int:
    """Create an empty dataset; returns the offset of its bytes, 0 if it has none."""
    item_type = h5py.h5t.py_create(ITEM_TYPES[piece.tensor.dtype], logical=True)
    space = h5py.h5s.create_simple(piece.shape) if piece.shape else h5py.h5s.create(h5py.h5s.SCALAR)
    dataset = h5py.h5d.create(target.id, piece.path.encode(), item_type, space, create, link)
    return int(dataset.get_offset()) if piece.num_bytes else 0


def host_buffer(num_bytes: int) -> Bytes:
    """Allocate page-aligned memory and touch it, so that the first snapshot has no page faults."""
    buffer = np.frombuffer(mmap.mmap(-1, num_bytes), dtype=np.uint8)
    buffer[:: mmap.PAGESIZE] = 0
    return buffer


class ShardImage:
    """A shard in memory: ``views`` has an array over it for each piece, to be filled before each write."""

    keeps = False
    """Whether the written file is this memory itself, so that the image must be kept."""

    def __init__(self, plan: Skeleton, allocate: Callable[[int], Bytes] = host_buffer) -> None:
        self.pieces = plan.pieces
        self.buffer = allocate(plan.num_bytes)
        for begin, data in plan.between:
            self.buffer[begin : begin + len(data)] = np.frombuffer(data, dtype=np.uint8)
        layout = sorted(zip(plan.offsets, plan.pieces, strict=True), key=lambda placed: placed[0])
        self.views = [
            view_of(self.buffer, piece, offset) for piece, offset in zip(plan.pieces, plan.offsets, strict=True)
        ]
        self.extents = [(offset, piece.num_bytes) for offset, piece in layout]
        self.summed_bytes = SUMMED_BYTES
        if any(piece.shape[1:] != piece.tensor.shape[1:] for piece in plan.pieces):  # a row is in several pieces
            self.summed_bytes = max(SUMMED_BYTES // MOST_TILES, shard_index.LEAST_BLOCK_BYTES)
        blocks = [blocks_of(extent, self.summed_bytes) for extent in self.extents]
        self.num_blocks = [len(each) for each in blocks]
        self.blocks = [block for each in blocks for block in each]
        self.sums = [0] * len(self.blocks)
        self.between = crc32(b"".join(data for _, data in plan.between))
        self.texts = [shard_index.piece_text(piece, offset) for offset, piece in layout]

    def first_not_finite(self, names: Collection[str]) -> str | None:
        """The first of these tensors with a NaN or infinity in this shard, or None."""
        for view, piece in zip(self.views, self.pieces, strict=True):
            if piece.tensor.name in names and not all_finite(view, piece.tensor.dtype):
                return piece.tensor.name
        return None

    def write(self, path: Path, is_dropped: Callable[[], bool] = lambda: False, mode: int = 0o666) -> None:
        """Write a new file durably, and compute the checksums at the same time.

        Raises:
            OSError, Dropped: see ``write_paced``.
        """
        write_paced(path, self.buffer, self.sum_up, is_dropped, lambda: self._index(path.name), mode)

    def sum_up(self, begin: int, end: int) -> None:
        """Compute the checksums of the blocks that begin in this range of bytes."""
        for number in range(bisect_left(self.blocks, (begin,)), bisect_left(self.blocks, (end,))):
            offset, length = self.blocks[number]
            self.sums[number] = crc32(self.buffer[offset : offset + length].data)

    def _index(self, file: str) -> bytes:
        """The index to append, once all checksums are computed."""
        texts = (f"{crc:08x}" for crc in self.sums)
        sums = ["".join(islice(texts, count)) for count in self.num_blocks]
        text = shard_index.shard_text(file, self.buffer.size, self.between, self.summed_bytes, self.texts, sums)
        return shard_index.framed(text, self.buffer.size)


def blocks_of(extent: tuple[int, int], block_bytes: int) -> list[tuple[int, int]]:
    """(offset, length) of the blocks of a piece, given those of the piece; empty for an empty piece."""
    offset, length = extent
    return [(offset + at, min(block_bytes, length - at)) for at in range(0, length, block_bytes)]


def gaps(extents: Sequence[tuple[int, int]], num_bytes: int) -> list[tuple[int, int]]:
    """(begin, end) of the nonempty ranges of a file that pieces, ascending (offset, length) pairs, do not cover."""
    found, position = [], 0
    for offset, length in extents:
        if length:
            found.append((position, offset))
            position = offset + length
    return [(begin, end) for begin, end in [*found, (position, num_bytes)] if begin < end]


def view_of(buffer: Bytes, piece: TensorPiece, offset: int) -> Array:
    """A piece's values as an array over its bytes in a buffer."""
    return np.ndarray(piece.shape, ITEM_TYPES[piece.tensor.dtype], buffer, offset)
