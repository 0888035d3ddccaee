"""Reads shards without libhdf5 and verifies checksums before any value is used.

Offsets and checksums come from the manifest. A part of a tensor is read block by block, which takes memory for one
block in addition to the result.
"""

from __future__ import annotations

import math
import os
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import NoReturn

import numpy as np

from hpctrain.checkpoint.format import shard_index
from hpctrain.checkpoint.format.boxes import Box, boxes_between, position, run_axis, span
from hpctrain.checkpoint.format.durable_files import crc32, open_regular, read_at, reading, reading_error
from hpctrain.checkpoint.format.layout import ITEM_TYPES, DamagedCheckpoint, Shard, StoredPiece
from hpctrain.checkpoint.format.shard import blocks_of, gaps
from hpctrain.system.array_types import Array, Bytes

SHARED_BYTES = 1 << 18
"""Minimum size of blocks that another thread checksums; for smaller ones, the handover would take longer."""
KEPT_BYTES = 8 << 20
"""Limit on the cache of partly used blocks: if a tensor was saved in pieces by columns, a reader of rows alternates
between the blocks of all pieces."""
LEAST_RUN_BYTES = 4096
"""Without checksums, contiguous runs of at least this size, a page, are read directly instead of whole blocks."""
PENDING = 2
"""Limit on the blocks that wait for the other thread."""
MOST_OPEN = 16
"""Limit on shards kept open while tensors are read, most of which are spread over several shards."""


def damaged(path: Path, names: list[str]) -> NoReturn:
    """Raise DamagedCheckpoint that names the tensors."""
    listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    text = f"the checksum of {listed or 'the bytes between the tensors'} does not match"
    raise DamagedCheckpoint(f"{path} is damaged: {text}")


def require_size(descriptor: int, path: Path, shard: Shard) -> None:
    """Raise DamagedCheckpoint unless an open file has the shard's size."""
    size = os.fstat(descriptor).st_size
    if size != shard.num_bytes:
        raise DamagedCheckpoint(f"{path} has {size} bytes in place of {shard.num_bytes}")


Memory = Callable[[int, int], Bytes]
"""memory(begin, end) returns memory into which these bytes of a file are read."""


def fresh(begin: int, end: int) -> Bytes:
    """New memory."""
    return np.empty(end - begin, np.uint8)


def read_shard(folder: Path, shard: Shard) -> Bytes:
    """Read and verify all bytes of a shard.

    Raises:
        DamagedCheckpoint: the file is missing, is a link, has a wrong size, or differs from what was written.
        UnreadableCheckpoint: it cannot be read now, or does not fit into memory.
    """
    path = folder / shard.file
    with reading(path) as descriptor:
        require_size(descriptor, path, shard)
        buffer = np.empty(shard.num_bytes, np.uint8)
        check_tensors(descriptor, path, shard, lambda begin, end: buffer[begin:end])
        check_between(descriptor, path, shard, lambda begin, end: buffer[begin:end])
        return buffer


def check_shard(folder: Path, shard: Shard) -> None:
    """Verify all bytes of a shard without keeping them. Raises as ``read_shard``."""
    path = folder / shard.file
    with reading(path) as descriptor:
        require_size(descriptor, path, shard)
        most = max((stored.block_bytes for stored in shard.pieces), default=0)
        turns = cycle([np.empty(most, np.uint8) for _ in range(PENDING + 1)])

        def memory(begin: int, end: int) -> Bytes:
            """Blocks that the other thread sums take turns; no small one between them may take one's turn."""
            return next(turns)[: end - begin] if end - begin >= SHARED_BYTES else fresh(begin, end)

        check_tensors(descriptor, path, shard, memory)
        check_between(descriptor, path, shard)


def check_rest(folder: Path, shard: Shard) -> None:
    """Verify the bytes of a shard outside its tensors. Raises as ``read_shard``."""
    path = folder / shard.file
    with reading(path) as descriptor:
        require_size(descriptor, path, shard)
        check_between(descriptor, path, shard)


def check_tensors(descriptor: int, path: Path, shard: Shard, memory: Memory) -> None:
    """Read and verify all tensors in a file; memory of a block of SHARED_BYTES or more may be reused
    after PENDING more such blocks.

    Raises DamagedCheckpoint, OSError.
    """
    with closing(Checks()) as checks:
        for stored in shard.pieces:
            piece = OpenPiece(descriptor, path, stored, checks)
            blocks = blocks_of((stored.offset, stored.piece.num_bytes), stored.block_bytes)
            for number, (begin, size) in enumerate(blocks):
                piece.read_block(number, memory(begin, begin + size))
        checks.finish(path)


def check_between(descriptor: int, path: Path, shard: Shard, memory: Memory = fresh) -> None:
    """Read and verify the bytes of a file outside its tensors. Raises DamagedCheckpoint, OSError."""
    found = 0
    for begin, end in gaps(sorted((it.offset, it.piece.num_bytes) for it in shard.pieces), shard.hdf5_bytes):
        part = memory(begin, end)
        read_at(descriptor, part.data, begin)
        found = crc32(part.data, found)
    if found != shard.crc32:
        damaged(path, [])
    index = memory(shard.hdf5_bytes, shard.num_bytes)
    read_at(descriptor, index.data, shard.hdf5_bytes)
    shard_index.require_same(index.tobytes(), shard, path)


class RecentBlocks:
    """Caches the last partly used block of each piece of a tensor, since the rest is often read next."""

    def __init__(self) -> None:
        self.tensor = ""
        self.blocks: OrderedDict[tuple[Path, int], tuple[int, Bytes]] = OrderedDict()
        """(number, bytes) of a block by (file, offset of its piece), most recently used last."""

    def get(self, path: Path, stored: StoredPiece, number: int, num_bytes: int, read: Callable[[Bytes], None]) -> Bytes:
        """The block as uint8[num_bytes]; calls ``read``, which also verifies it, unless it is cached."""
        place = (path, stored.offset)
        if stored.piece.tensor.name != self.tensor:
            self.blocks.clear()
            self.tensor = stored.piece.tensor.name
        kept, values = self.blocks.pop(place, (None, np.empty(0, np.uint8)))
        if kept != number:
            del values  # free it before the next is allocated
            while self.blocks and num_bytes + sum(each.size for _, each in self.blocks.values()) > KEPT_BYTES:
                self.blocks.popitem(last=False)
            values = np.empty(num_bytes, np.uint8)
            read(values)
        self.blocks[place] = number, values
        return values


class Checks:
    """Verifies checksums of blocks that were read, those of large blocks in another thread while more is read."""

    def __init__(self) -> None:
        self.helper: ThreadPoolExecutor | None = None
        self.pending: list[tuple[Future[int], int, str]] = []
        """(checksum, expected value, tensor) of each block in the other thread."""
        self.wrong: dict[str, None] = {}
        """Damaged tensors, in order."""

    def add(self, memory: Bytes, expected: int, name: str) -> None:
        """Check a block that was read. Memory of SHARED_BYTES or more must not change until PENDING more of these were
        added."""
        if memory.size < SHARED_BYTES:
            self._compare(crc32(memory.data), expected, name)
            return
        self.helper = self.helper or ThreadPoolExecutor(1, "checksum")
        self.pending.append((self.helper.submit(crc32, memory.data), expected, name))
        if len(self.pending) > PENDING:
            self._settle()

    def finish(self, path: Path) -> None:
        """Raise DamagedCheckpoint unless all added blocks of this file match their checksums."""
        while self.pending:
            self._settle()
        names, self.wrong = list(self.wrong), {}
        if names:
            damaged(path, names)

    def close(self) -> None:
        """End the thread, which restarts when needed; blocks not compared yet are discarded."""
        if self.helper:
            self.helper.shutdown()
        self.helper, self.pending, self.wrong = None, [], {}

    def _settle(self) -> None:
        found, expected, name = self.pending.pop(0)
        self._compare(found.result(), expected, name)

    def _compare(self, found: int, expected: int, name: str) -> None:
        if found != expected:
            self.wrong[name] = None


class ShardFiles:
    """The shards of a checkpoint, opened on first use; the least recently used are closed if many are open."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.open: OrderedDict[str, int] = OrderedDict()
        """Descriptors by file, most recently used last."""
        self.recent = RecentBlocks()
        self.checks = Checks()

    def read(self, shard: Shard, stored: StoredPiece, wanted: Box, out: Array) -> None:
        """Copy the overlap of a piece and a part of its tensor to ``out``; every block used is verified.

        Args:
            shard: the shard that holds the piece.
            stored: the piece.
            wanted: the part, as a box in the tensor.
            out: array for that part, with the stored item type; elements outside the piece are not changed.

        Raises:
            DamagedCheckpoint: the file is missing or has a wrong size, or a block differs from what was written.
            UnreadableCheckpoint: it cannot be read now.
        """
        path = self.folder / shard.file
        try:
            piece = OpenPiece(self._descriptor(shard, path), path, stored, self.checks)
            if wanted == stored.piece.box:
                piece.read_whole(out)
            else:
                piece.read_part(wanted, out, self.recent)
            self.checks.finish(path)
        except (OSError, MemoryError) as error:
            self.close()  # so that a retry opens the files again: a file server's handles may be stale
            raise reading_error(error, path) from error

    def read_whole(self, shard: Shard, stored: StoredPiece) -> Array:
        """Read all values of a piece. Raises as ``read``."""
        out = self.allocate(stored.piece.shape, stored.piece.tensor.dtype)
        self.read(shard, stored, stored.piece.box, out)
        return out

    def allocate(self, shape: tuple[int, ...], dtype: str) -> Array:
        """Allocate memory for values of a logical type. Raises UnreadableCheckpoint if there is not enough."""
        try:
            return np.empty(shape, ITEM_TYPES[dtype])
        except MemoryError as error:
            raise reading_error(error, self.folder) from error

    def close(self) -> None:
        """Close all files; the next read opens them again."""
        self.recent = RecentBlocks()
        self.checks.close()
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


@dataclass(frozen=True)
class OpenPiece:
    """A piece in an open shard. Methods raise OSError, MemoryError and DamagedCheckpoint."""

    descriptor: int
    path: Path
    stored: StoredPiece
    checks: Checks

    def read_whole(self, out: Array) -> None:
        """Read the whole piece into a contiguous array."""
        memory = out.reshape(-1).view(np.uint8)
        block_bytes = self.stored.block_bytes
        for number, begin in enumerate(range(0, memory.size, block_bytes)):
            self.read_block(number, memory[begin : begin + block_bytes])

    def read_part(self, wanted: Box, out: Array, recent: RecentBlocks) -> None:
        """See ``ShardFiles.read``."""
        piece, block_bytes = self.stored.piece, self.stored.block_bytes
        common = piece.box.overlap(wanted)
        if not common.size:
            return
        item = ITEM_TYPES[piece.tensor.dtype]
        here = common.seen_from(piece.box.begin)
        target = out[common.seen_from(wanted.begin).index]
        if self.stored.crc32 is None and self._read_runs(here, target):
            return
        first, end_item = span(here, piece.shape)
        begin, end = first * item.itemsize, end_item * item.itemsize
        is_run = end_item - first == here.size and target.flags.c_contiguous
        run = target.reshape(-1).view(np.uint8) if is_run else None
        for number in range(begin // block_bytes, -(-end // block_bytes)):
            block_begin = number * block_bytes
            block_end = min(block_begin + block_bytes, piece.num_bytes)
            if run is not None and begin <= block_begin and block_end <= end:  # read directly into the result
                self.read_block(number, run[block_begin - begin : block_end - begin])
                continue
            parts = list(boxes_between(piece.shape, block_begin // item.itemsize, block_end // item.itemsize))
            if not any(part.overlap(here).size for part in parts):
                continue
            read = partial(self._read_verified, number)
            block = recent.get(self.path, self.stored, number, block_end - block_begin, read)
            scatter(block.view(item), parts, here, target)

    def _read_runs(self, here: Box, target: Array) -> bool:
        """Without checksums, read only the wanted bytes; returns False if they are in runs that are too short."""
        shape = self.stored.piece.shape
        axis = run_axis(here, shape)
        item_bytes, run = target.itemsize, math.prod(here.shape[axis:])
        if not target.flags.c_contiguous or (run * item_bytes < LEAST_RUN_BYTES and run < here.size):
            return False
        for index in np.ndindex(*here.shape[:axis]):
            begin = (*map(int.__add__, here.begin, index), *here.begin[axis:])
            memory = target[(*index, ...)].reshape(-1).view(np.uint8)
            read_at(self.descriptor, memory.data, self.stored.offset + position(begin, shape) * item_bytes)
        return True

    def read_block(self, number: int, memory: Bytes) -> None:
        """Fill ``memory`` with a block and add its checksum to ``checks``, if the file has checksums."""
        read_at(self.descriptor, memory.data, self.stored.offset + number * self.stored.block_bytes)
        if self.stored.crc32 is not None:
            self.checks.add(memory, self.stored.crc32[number], self.stored.piece.tensor.name)

    def _read_verified(self, number: int, memory: Bytes) -> None:
        """Like ``read_block``, but verify the block immediately."""
        self.read_block(number, memory)
        self.checks.finish(self.path)


def scatter(values: Array, parts: list[Box], here: Box, target: Array) -> None:
    """Copy the wanted elements of a block to ``target``.

    Args:
        values: items of the block, 1-dimensional.
        parts: boxes of the piece that these items form, in order.
        here: the wanted box, in the piece.
        target: array for the wanted box.
    """
    first = 0
    for part in parts:
        common = part.overlap(here)
        if common.size:
            source = values[first : first + part.size].reshape(part.shape)
            target[common.seen_from(here.begin).index] = source[common.seen_from(part.begin).index]
        first += part.size
