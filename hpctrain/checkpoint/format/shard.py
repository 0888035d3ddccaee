"""One shard to be written: an image of the HDF5 file in memory, filled in place, written in large blocks.

h5py makes the skeleton once: contiguous datasets, allocated at creation and never filled, so that every byte of the
file is either metadata, which stays the same from save to save, or lies at a known offset. Values are copied to their
offsets and the image is written as a whole: no call into the library, and no lock of it, while training continues.
The shard's index, which HDF5 does not know of, is appended.
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
from numpy.typing import NDArray

from hpctrain.checkpoint.format import shard_index
from hpctrain.checkpoint.format.files import crc32
from hpctrain.checkpoint.format.layout import ITEM_TYPES, MOST_TILES, TensorPiece
from hpctrain.checkpoint.format.paced_write import write_paced
from hpctrain.system.shared_memory import unnamed_file

ALIGNMENT_BYTES = 64
"""A cache line: arrays can be used in place, in the image."""
SUMMED_BYTES = 1 << 20
"""Bytes of a piece that have a checksum: the least that a reader verifies, and so reads, of a large one."""
METADATA_BLOCK_BYTES = 1 << 16


@dataclass(frozen=True)
class Skeleton:
    """An HDF5 file without the values: the bytes outside them, and where they belong."""

    pieces: tuple[TensorPiece, ...]
    offsets: tuple[int, ...]
    num_bytes: int
    between: tuple[tuple[int, bytes], ...]
    """Where each stretch begins that holds no values, and its bytes."""


def skeleton(pieces: Sequence[TensorPiece]) -> Skeleton:
    """Lays out a file for these pieces; the same pieces give the same bytes."""
    link = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    link.set_create_intermediate_group(True)
    create = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    create.set_layout(h5py.h5d.CONTIGUOUS)
    create.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    create.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    create.set_obj_track_times(False)
    with open(unnamed_file(), "w+b", buffering=0) as file:  # no memory for values: they are never written
        for size in (sum(piece.num_bytes for piece in pieces), 0):  # libhdf5 takes it badly if files are limited
            file.truncate(size)
        with create_file(file) as target:
            offsets = [create_dataset(target, piece, link, create) for piece in pieces]
        num_bytes = file.seek(0, os.SEEK_END)
        extents = sorted((offset, piece.num_bytes) for offset, piece in zip(offsets, pieces, strict=True))
        between = tuple((begin, os.pread(file.fileno(), end - begin, begin)) for begin, end in gaps(extents, num_bytes))
    return Skeleton(tuple(pieces), tuple(offsets), num_bytes, between)


def create_file(file: io.FileIO) -> h5py.File:
    """An HDF5 file of which no byte depends on the time; h5py.File itself would keep that of the root group."""
    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    access.set_fileobj_driver(h5py.h5fd.fileobj_driver, file)
    access.set_libver_bounds(h5py.h5f.LIBVER_V18, h5py.h5f.LIBVER_V18)
    access.set_alignment(1, ALIGNMENT_BYTES)
    access.set_meta_block_size(METADATA_BLOCK_BYTES)
    create = h5py.h5p.create(h5py.h5p.FILE_CREATE)
    create.set_obj_track_times(False)
    return h5py.File(h5py.h5f.create(b"skeleton", h5py.h5f.ACC_TRUNC, create, access))


def create_dataset(target: h5py.File, piece: TensorPiece, link: Any, create: Any) -> int:
    """An empty dataset; returns where its bytes will be."""
    item_type = h5py.h5t.py_create(ITEM_TYPES[piece.tensor.dtype], logical=True)
    space = h5py.h5s.create_simple(piece.shape) if piece.shape else h5py.h5s.create(h5py.h5s.SCALAR)
    dataset = h5py.h5d.create(target.id, piece.path.encode(), item_type, space, create, link)
    return int(dataset.get_offset()) if piece.num_bytes else 0


def host_buffer(num_bytes: int) -> NDArray[np.uint8]:
    """Page-aligned memory, touched so that the first snapshot does not pay for it."""
    buffer = np.frombuffer(mmap.mmap(-1, num_bytes), dtype=np.uint8)
    buffer[:: mmap.PAGESIZE] = 0
    return buffer


class ShardImage:
    """A shard in memory: ``views`` are arrays over it, one for each piece, to be filled before each write."""

    keeps = False
    """Whether what was written last is this memory itself."""

    def __init__(self, plan: Skeleton, allocate: Callable[[int], NDArray[np.uint8]] = host_buffer) -> None:
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
        if any(piece.shape[1:] != piece.tensor.shape[1:] for piece in plan.pieces):  # rows are read from several
            self.summed_bytes = max(SUMMED_BYTES // MOST_TILES, shard_index.LEAST_BLOCK_BYTES)
        blocks = [blocks_of(extent, self.summed_bytes) for extent in self.extents]
        self.num_blocks = [len(each) for each in blocks]
        self.blocks = [block for each in blocks for block in each]
        self.sums = [0] * len(self.blocks)
        self.between = crc32(b"".join(data for _, data in plan.between))
        self.texts = [shard_index.piece_text(piece, offset) for offset, piece in layout]

    def first_not_finite(self, names: Collection[str]) -> str | None:
        """The first tensor among these that holds a NaN or infinity here."""
        for view, piece in zip(self.views, self.pieces, strict=True):
            if piece.tensor.name in names and not all_finite(view, piece.tensor.dtype):
                return piece.tensor.name
        return None

    def write(self, path: Path, is_dropped: Callable[[], bool] = lambda: False, mode: int = 0o666) -> None:
        """Writes a new file, durably; it is summed up meanwhile.

        Raises:
            OSError, Dropped: see ``write_paced``.
        """
        write_paced(path, self.buffer, self.sum_up, is_dropped, lambda: self._index(path.name), mode)

    def sum_up(self, begin: int, end: int) -> None:
        """Takes the checksums of the blocks that begin between these bytes."""
        for number in range(bisect_left(self.blocks, (begin,)), bisect_left(self.blocks, (end,))):
            offset, length = self.blocks[number]
            self.sums[number] = crc32(self.buffer[offset : offset + length].data)

    def _index(self, file: str) -> bytes:
        """The index, which follows the HDF5 bytes, once these are all summed up."""
        texts = (f"{crc:08x}" for crc in self.sums)
        sums = ["".join(islice(texts, count)) for count in self.num_blocks]
        text = shard_index.shard_text(file, self.buffer.size, self.between, self.summed_bytes, self.texts, sums)
        return shard_index.framed(text, self.buffer.size)


def blocks_of(extent: tuple[int, int], block_bytes: int) -> list[tuple[int, int]]:
    """(offset, length) of the blocks of a piece, from those of the piece; none of an empty one."""
    offset, length = extent
    return [(offset + at, min(block_bytes, length - at)) for at in range(0, length, block_bytes)]


def gaps(extents: Sequence[tuple[int, int]], num_bytes: int) -> list[tuple[int, int]]:
    """(begin, end) of what is left of this many bytes between (offset, length) of pieces, in ascending order."""
    found, position = [], 0
    for offset, length in extents:
        if length:
            found.append((position, offset))
            position = offset + length
    return [(begin, end) for begin, end in [*found, (position, num_bytes)] if begin < end]


def view_of(buffer: NDArray[np.uint8], piece: TensorPiece, offset: int) -> NDArray[Any]:
    """The piece's values as an array over its bytes in a shard's image."""
    return np.ndarray(piece.shape, ITEM_TYPES[piece.tensor.dtype], buffer, offset)


def all_finite(values: NDArray[Any], dtype: str) -> bool:
    """Whether all values of an array of this logical dtype are finite."""
    if dtype == "bfloat16":
        return not np.any(values & 0x7F80 == 0x7F80)  # all bits of the exponent
    with np.errstate(all="ignore"):  # a sum reads as fast as memory gives, and hides neither NaN nor infinity
        total = np.add.reduce(values, axis=None, dtype=np.float32 if dtype == "float16" else None)
    return bool(np.isfinite(total)) or bool(np.isfinite(values).all())
