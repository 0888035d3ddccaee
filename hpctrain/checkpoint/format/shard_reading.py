"""Shards as they are read: nothing is used before its checksum, and libhdf5 takes no part.

Places and sums come from the manifest. A part of a tensor is read block by block: what is held beside the result is one
block. In format 1, a block is a whole piece.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from hpctrain.checkpoint.format import shard_index
from hpctrain.checkpoint.format.boxes import Box, boxes_between, span
from hpctrain.checkpoint.format.checksum import crc32
from hpctrain.checkpoint.format.files import judged, open_regular, read_at, reading
from hpctrain.checkpoint.format.layout import ITEM_TYPES, DamagedCheckpoint, Shard, StoredPiece
from hpctrain.checkpoint.format.shard import blocks_of, gaps

READ_BYTES = 1 << 20
"""Of one system call, when a whole file is read: they stay in the cache until they are summed up."""
MOST_OPEN = 16
"""Shards that are kept open while tensors are read, most of which lie in several."""


class ShardCheck:
    """Sums up all bytes of a shard as they come, in order."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self.blocks = sorted(
            (begin, begin + length, crc, stored.piece.tensor.name)
            for stored in shard.pieces
            for (begin, length), crc in zip(block_extents(stored), stored.crc32 or (), strict=True)
        )
        self.next = 0
        """Block that has not ended yet."""
        self.position = 0
        self.crc = 0
        """Of that block until now."""
        self.between = 0
        """Of the HDF5 bytes in no block."""
        self.whole = 0
        self.index = bytearray()
        self.names: dict[str, None] = {}
        """Tensors that are not what they were."""

    def feed(self, view: memoryview) -> None:
        """The next bytes."""
        if not self.shard.has_index:
            self.whole = crc32(view, self.whole)
        at = 0
        while at < len(view):
            begin, end, crc, name = self.blocks[self.next] if self.next < len(self.blocks) else (1 << 62, 0, 0, "")
            here = self.position + at
            if here < begin:
                part = view[at : at + begin - here]
                self._take_between(part, here)
            else:
                part = view[at : at + end - here]
                self.crc = crc32(part, self.crc)
                if here + len(part) == end:
                    if self.crc != crc:
                        self.names[name] = None
                    self.next, self.crc = self.next + 1, 0
            at += len(part)
        self.position += len(view)

    def _take_between(self, view: memoryview, here: int) -> None:
        of_hdf5 = max(0, self.shard.hdf5_bytes - here)
        self.between = crc32(view[:of_hdf5], self.between)
        self.index += view[of_hdf5:]

    def require_sound(self, path: Path) -> None:
        """Raises DamagedCheckpoint unless all bytes, which have come by now, are what was once written."""
        shard = self.shard
        if self.names:
            damaged(path, list(self.names))
        if shard.has_index and shard_index.unframed(bytes(self.index), shard.hdf5_bytes) is None:
            raise DamagedCheckpoint(f"{path} is damaged: the checksum of its index does not match")
        if (self.between if shard.has_index else self.whole) != shard.crc32:
            damaged(path, [])


def damaged(path: Path, names: list[str]) -> NoReturn:
    """Raises DamagedCheckpoint that names tensors."""
    listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    text = f"the checksum of {listed or 'the bytes between the tensors'} does not match"
    raise DamagedCheckpoint(f"{path} is damaged: {text}")


def block_extents(stored: StoredPiece) -> list[tuple[int, int]]:
    """(offset in the file, length) of each block of a piece."""
    return blocks_of((stored.offset, stored.piece.num_bytes), stored.block_bytes)


def require_size(descriptor: int, path: Path, shard: Shard) -> None:
    """Raises DamagedCheckpoint unless an open file has a shard's size."""
    size = os.fstat(descriptor).st_size
    if size != shard.num_bytes:
        raise DamagedCheckpoint(f"{path} has {size} bytes in place of {shard.num_bytes}")


def read_shard(folder: Path, shard: Shard) -> NDArray[np.uint8]:
    """All bytes of a shard, after their checksums.

    Raises:
        DamagedCheckpoint: the file is missing, a link, of another size, or not what was once written.
        UnreadableCheckpoint: it cannot be read now, or does not fit into memory.
    """
    with reading(folder / shard.file) as descriptor:
        require_size(descriptor, folder / shard.file, shard)
        buffer = np.empty(shard.num_bytes, dtype=np.uint8)
        check_all(descriptor, shard, folder / shard.file, lambda begin, end: buffer[begin:end].data)
        return buffer


def check_shard(folder: Path, shard: Shard) -> None:
    """Verifies all bytes of a shard, and keeps none. Raises as ``read_shard``."""
    scratch = np.empty((2, READ_BYTES), dtype=np.uint8)
    with reading(folder / shard.file) as descriptor:
        require_size(descriptor, folder / shard.file, shard)
        path = folder / shard.file
        check_all(descriptor, shard, path, lambda begin, end: scratch[begin // READ_BYTES % 2, : end - begin].data)


def check_all(descriptor: int, shard: Shard, path: Path, memory: Callable[[int, int], memoryview]) -> None:
    """Reads a file into memory that is given piecemeal and may be used again for the part after the next.

    Another thread sums up one part while the next is read. Raises DamagedCheckpoint, OSError.
    """
    check = ShardCheck(shard)
    with ThreadPoolExecutor(1, "checksum") as helper:
        summed: list[Future[None]] = []
        for begin in range(0, shard.num_bytes, READ_BYTES):
            part = memory(begin, min(begin + READ_BYTES, shard.num_bytes))
            if len(summed) > 1:
                summed.pop(0).result()
            read_at(descriptor, part, begin)
            summed.append(helper.submit(check.feed, part))
        for last in summed:
            last.result()
    check.require_sound(path)


def check_rest(folder: Path, shard: Shard) -> None:
    """Verifies what is in a shard beside its tensors. Raises as ``read_shard``.

    Format 1 has a sum of the whole file only, so all of it is read.
    """
    if not shard.has_index:
        check_shard(folder, shard)
        return
    path = folder / shard.file
    with reading(path) as descriptor:
        require_size(descriptor, path, shard)
        extents = sorted((stored.offset, stored.piece.num_bytes) for stored in shard.pieces)
        found = 0
        for begin, end in gaps(extents, shard.hdf5_bytes):
            part = bytearray(end - begin)
            read_at(descriptor, memoryview(part), begin)
            found = crc32(part, found)
        if found != shard.crc32:
            damaged(path, [])
        tail = bytearray(shard.num_bytes - shard.hdf5_bytes)
        read_at(descriptor, memoryview(tail), shard.hdf5_bytes)
        if shard_index.unframed(bytes(tail), shard.hdf5_bytes) is None:
            raise DamagedCheckpoint(f"{path} is damaged: the checksum of its index does not match")


@dataclass
class LastBlock:
    """The block of which a part was used last: the rest of it is often wanted next."""

    place: tuple[Path, int] = (Path(), 0)
    """File, and where the block begins there."""
    values: NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8))
    """Its bytes, which were verified; none before the first one."""


class ShardFiles:
    """The shards of a checkpoint, each opened when it is first read and closed when many others are open."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.open: OrderedDict[str, int] = OrderedDict()
        """Descriptors by file, the one used last at the end."""
        self.last = LastBlock()

    def read(self, shard: Shard, stored: StoredPiece, wanted: Box, out: NDArray[Any]) -> None:
        """Fills what a piece has of a part of its tensor, after verifying every block that is used.

        Args:
            shard: that holds the piece.
            stored: the piece.
            wanted: the part, in the tensor.
            out: array over that part, item type as stored; elements that the piece does not have are left alone.

        Raises:
            DamagedCheckpoint: the file is missing, of another size, or a block is not what was once written.
            UnreadableCheckpoint: it cannot be read now.
        """
        path = self.folder / shard.file
        try:
            descriptor = self._descriptor(shard, path)
            if not read_part(descriptor, path, stored, wanted, out, self.last):
                damaged(path, [stored.piece.tensor.name])
        except (OSError, MemoryError) as error:
            raise judged(error, path) from error

    def read_whole(self, shard: Shard, stored: StoredPiece) -> NDArray[Any]:
        """All values of a piece. Raises as ``read``."""
        out = self.allocate(stored.piece.shape, stored.piece.tensor.dtype)
        self.read(shard, stored, stored.piece.box, out)
        return out

    def allocate(self, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
        """Memory for values of a logical type. Raises UnreadableCheckpoint if there is not so much."""
        try:
            return np.empty(shape, ITEM_TYPES[dtype])
        except MemoryError as error:
            raise judged(error, self.folder) from error

    def close(self) -> None:
        """Closes all files; they are opened again when they are needed."""
        self.last = LastBlock()
        while self.open:
            os.close(self.open.popitem()[1])

    def _descriptor(self, shard: Shard, path: Path) -> int:
        if shard.file not in self.open:
            descriptor = open_regular(path)
            try:
                require_size(descriptor, path, shard)
            except (OSError, DamagedCheckpoint):
                os.close(descriptor)
                raise
            self.open[shard.file] = descriptor
            if len(self.open) > MOST_OPEN:
                os.close(self.open.popitem(last=False)[1])
        self.open.move_to_end(shard.file)
        return self.open[shard.file]


def read_part(
    descriptor: int, path: Path, stored: StoredPiece, wanted: Box, out: NDArray[Any], last: LastBlock
) -> bool:
    """See ``ShardFiles.read``; whether all blocks are what was once written. Raises OSError, MemoryError."""
    piece = stored.piece
    common = piece.box.overlap(wanted)
    if not common.size:
        return True
    item = ITEM_TYPES[piece.tensor.dtype]
    here = common.seen_from(piece.box.begin)
    target = out[common.seen_from(wanted.begin).index]
    first, end_item = span(here, piece.shape)
    begin, end = first * item.itemsize, end_item * item.itemsize
    is_run = end_item - first == here.size and target.flags.c_contiguous
    run = target.reshape(-1).view(np.uint8) if is_run else None
    for number in range(begin // stored.block_bytes, -(-end // stored.block_bytes)):
        block_begin = number * stored.block_bytes
        block_end = min(block_begin + stored.block_bytes, piece.num_bytes)
        offset = stored.offset + block_begin
        if run is not None and begin <= block_begin and block_end <= end:  # straight to where it belongs
            if not read_block(descriptor, run[block_begin - begin : block_end - begin], offset, stored, number):
                return False
            continue
        parts = list(boxes_between(piece.shape, block_begin // item.itemsize, block_end // item.itemsize))
        if not any(part.overlap(here).size for part in parts):
            continue
        if last.place != (path, offset) or last.values.size != block_end - block_begin:
            last.values = np.empty(0, np.uint8)  # frees it before the next is taken
            values = np.empty(block_end - block_begin, np.uint8)
            if not read_block(descriptor, values, offset, stored, number):
                return False
            last.place, last.values = (path, offset), values
        scatter(last.values.view(item), parts, here, target)
    return True


def read_block(descriptor: int, memory: NDArray[np.uint8], offset: int, stored: StoredPiece, number: int) -> bool:
    """Fills memory with a block of a piece; whether that is what was once written, as far as the file tells."""
    found = read_and_sum(descriptor, memory, offset)
    return stored.crc32 is None or found == stored.crc32[number]


def read_and_sum(descriptor: int, block: NDArray[np.uint8], offset: int) -> int:
    """Fills memory with the bytes at a place in a file; their CRC-32."""
    view, crc = block.data, 0
    for begin in range(0, len(view), READ_BYTES):
        part = view[begin : begin + READ_BYTES]
        read_at(descriptor, part, offset + begin)
        crc = crc32(part, crc)
    return crc


def scatter(values: NDArray[Any], parts: list[Box], here: Box, target: NDArray[Any]) -> None:
    """Copies what is wanted of a block.

    Args:
        values: items of the block, 1-dimensional.
        parts: boxes of the piece that these items make up, in order.
        here: what is wanted, in the piece.
        target: array over what is wanted.
    """
    position = 0
    for part in parts:
        common = part.overlap(here)
        if common.size:
            source = values[position : position + part.size].reshape(part.shape)
            target[common.seen_from(here.begin).index] = source[common.seen_from(part.begin).index]
        position += part.size
