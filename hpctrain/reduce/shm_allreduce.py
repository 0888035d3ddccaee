"""Sums over ranks through shared memory.

The ranks of a node keep their buffers in one shared-memory file. When all have arrived, each rank sums its own slice
of all buffers, always in the same order, and writes the sum back to all of them: reduce-scatter and allgather at memory
speed, with bitwise identical results on every rank and in every run. With several nodes, ranks of equal local index sum
their slices between these two steps, by MPI's Allreduce.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import DTypeLike, NDArray

from hpctrain.comm.group import Group
from hpctrain.reduce.flat_layout import SQUARE, Layout, slices
from hpctrain.reduce.mpi_allreduce import add_everywhere
from hpctrain.system import shared_memory
from hpctrain.system.array_types import Array

if TYPE_CHECKING:
    from mpi4py import MPI

ARRIVE, ADD = "reach the exchange of gradients on this node", "add up their gradients on this node"
"""Each completes "waited for the other ranks to ..." in errors."""
CHUNK = 32768
"""Elements summed and written back at a time, few enough to stay in a core's private cache in between."""


@dataclass(frozen=True)
class SharedArrays:
    """Arrays shared by all ranks of a node; see ``share_arrays``."""

    node: Group
    """The ranks that share them."""
    peers: MPI.Comm | None
    """Ranks with the same local index on all nodes; None if there is one node."""
    memory: mmap.mmap
    arrays: tuple[Array, ...]
    """One per rank of the node, then those common to all."""

    def free(self) -> None:
        """Frees the communicators; the memory is freed with its last view."""
        self.node.free()
        if self.peers:
            self.peers.Free()


class ShmAllreduce:
    """Sums a flat buffer over the ranks of a group; see ``open_shm_allreduce``."""

    def __init__(self, shared: SharedArrays) -> None:
        self.node = shared.node
        self.parts = shared.arrays
        self.slice = slices(len(self.parts[0]), len(self.parts))[self.node.rank]
        self.buffer = self.parts[self.node.rank]
        """This rank's values, then the sums; in shared memory."""
        self.between = between_nodes(shared.peers, self.parts[0][self.slice])
        self.close = shared.free

    def start(self, begin: int, end: int) -> None:
        """Does nothing: copying while other ranks compute would only slow them down."""

    def finish(self) -> None:
        """Overwrites the buffers of all ranks with their sum."""
        self.node.meet(ARRIVE)
        if self.between:
            self._sum_slice(write_back=False)
            self.between()
            for part in self.parts[1:]:
                part[self.slice] = self.parts[0][self.slice]
        else:
            self._sum_slice(write_back=True)
        self.node.meet(ADD)

    def _sum_slice(self, write_back: bool) -> None:
        for begin, end in chunks(self.slice.start, self.slice.stop):
            add_pairwise([part[begin:end] for part in self.parts], self.parts[0][begin:end])
            if write_back:
                for part in self.parts[1:]:
                    part[begin:end] = self.parts[0][begin:end]


def between_nodes(peers: MPI.Comm | None, values: Array) -> Callable[[], None] | None:
    """A function that sums an array in place over ranks of equal local index; None for one node."""
    return partial(add_everywhere, peers, values) if peers else None


def chunks(begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Splits a range into ranges of at most CHUNK elements."""
    return ((at, min(at + CHUNK, end)) for at in range(begin, end, CHUNK))


def add_pairwise(terms: Sequence[Array], out: Array, kept: int | None = None) -> None:
    """Puts the sum into ``out``, which may be the first term; rounding error grows with the log of the number of terms.

    Overwrites the other terms, except the one with index ``kept``.
    """
    left = list(terms)
    stride = 1
    while stride < len(left):
        for index in range(0, len(left) - stride, 2 * stride):
            spare = left[index + stride] if index == kept and stride == 1 else left[index]
            left[index] = np.add(left[index], left[index + stride], out=out if index == 0 else spare)
        stride *= 2


def sum_pairwise(terms: Sequence[Array], out: Array) -> None:
    """The same sum, bitwise, without changing the terms."""
    left = list(terms)
    while len(left) > 2:
        odd = left[len(left) // 2 * 2 :]
        left = [first + second for first, second in zip(left[::2], left[1::2], strict=False)] + odd
    np.add(left[0], left[-1], out=out)


def open_shm_allreduce(group: Group, length: int, dtype: DTypeLike = np.float32) -> ShmAllreduce | None:
    """Opens shared buffers of ``length`` elements for each rank of a group; None on all ranks if that is impossible.

    Collective over the group.
    """
    shared = share_arrays(group, length, dtype)
    return ShmAllreduce(shared) if shared else None


def share_arrays(group: Group, length: int, dtype: DTypeLike, common: int = 0) -> SharedArrays | None:
    """Shares an array of ``length`` elements per rank of a node, and ``common`` more that belong to all of its ranks.

    Returns None on all ranks if no two ranks share a node, if nodes hold different numbers of ranks, or if shared
    memory is too small or separate (containers). Collective over the group.
    """
    if group.comm is None:
        return None
    from mpi4py import MPI

    node = Group("node", group.comm.Split_type(MPI.COMM_TYPE_SHARED, key=group.rank))
    local_sizes = set(group.allgather(node.size, "compare the numbers of ranks on the nodes"))
    if local_sizes == {1} or len(local_sizes) > 1:
        node.free()
        return None
    bytes_each = -(-length * np.dtype(dtype).itemsize // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = _share(node, bytes_each, common)
    if not all(group.allgather(memory is not None, "share memory")) or memory is None:
        node.free()
        return None
    arrays = tuple(np.frombuffer(memory, dtype, length, offset=at * bytes_each) for at in range(node.size + common))
    peers = group.comm.Split(color=node.rank, key=group.rank) if group.size > node.size else None
    return SharedArrays(node, peers, memory, arrays)


def _share(node: Group, bytes_each: int, common: int) -> mmap.mmap | None:
    """Maps memory shared by a node's ranks. Each allocates its own part, so that it is near its core and a lack of
    space is noticed.

    A plain file rather than an MPI window: it works with every MPI, and a full /dev/shm is an error here instead of a
    bus error later.
    """
    begins = [node.rank, *(range(node.size, node.size + common) if node.rank == 0 else ())]
    ranges = [(begin * bytes_each, bytes_each) for begin in begins]
    handle, path = None, None
    if node.rank == 0:
        with contextlib.suppress(OSError):
            handle, path = shared_memory.create(ranges, shared_memory.FOLDER)
    path = node.broadcast(path, "name the shared memory")
    if path is not None and node.rank > 0:
        with contextlib.suppress(OSError):
            handle = shared_memory.attach(path, ranges)
    complete = all(node.allgather(handle is not None, "allocate shared memory"))
    if path is not None and node.rank == 0:
        os.unlink(path)
    if handle is None:
        return None
    try:
        return mmap.mmap(handle, (node.size + common) * bytes_each) if complete else None
    finally:
        os.close(handle)


def share_on_node(group: Group, length: int, dtype: DTypeLike) -> SharedArrays | None:
    """Like ``share_arrays``, but None, on all ranks, if the group spans several nodes."""
    shared = share_arrays(group, length, dtype)
    if shared is not None and shared.peers:
        shared.free()
        return None
    return shared


MOST_BYTES = 2**17
"""Most bytes that a rank of ``SmallShmAllreduce`` reads: beyond that, slices and a second barrier are faster."""


class SmallShmAllreduce:
    """Sums few values over the ranks of a node with one barrier per sum; see ``open_shm_small``.

    Summing by slices needs two barriers: before the sums, and before they are read. Reading few values is faster than a
    barrier, so each rank sums all of them itself; in the same order, hence with bitwise equal results.
    """

    def __init__(self, shared: SharedArrays) -> None:
        """
        Args:
            shared: an array per rank, of twice the buffer's length: for even and odd exchanges in turn. No rank
                overwrites what another is still reading, as that one has not entered the next exchange yet.
        """
        self.node, self.close = shared.node, shared.free
        length = len(shared.arrays[0]) // 2
        self.places = [[part[:length] for part in shared.arrays], [part[length:] for part in shared.arrays]]
        self.buffer = np.zeros(length, shared.arrays[0].dtype)
        """This rank's values, then the sums."""

    def start(self, begin: int, end: int) -> None:
        """Does nothing: the whole sum is done in ``finish``."""

    def finish(self) -> None:
        """Overwrites the buffer with its sum over the ranks."""
        parts = self.places[0]
        parts[self.node.rank][:] = self.buffer
        self.node.meet(ARRIVE)
        sum_pairwise(parts, self.buffer)
        self.places.reverse()


def open_shm_small(group: Group, length: int, dtype: DTypeLike) -> SmallShmAllreduce | None:
    """Opens a small sum; None, on all ranks, if it is too large or the group spans several nodes. Collective."""
    is_few = length * np.dtype(dtype).itemsize * group.size <= MOST_BYTES
    shared = share_on_node(group, 2 * length, dtype) if is_few else None
    return SmallShmAllreduce(shared) if shared is not None else None


PIECE = 2**20
"""Bytes that each rank shows at a time: larger pieces do not fit the caches, smaller ones need too many barriers."""


class ShmWindow:
    """Sums arrays of any size and type over the ranks of a node, piece by piece.

    The arrays stay where they are: their values pass through a small shared buffer that stays in the cores' caches. See
    ``open_shm_window``.
    """

    def __init__(self, shared: SharedArrays) -> None:
        """
        Args:
            shared: a uint8 array of even length per rank; its halves serve even and odd pieces in turn. No rank
                overwrites what another is still reading, as that one has not entered the next exchange yet.
        """
        self.node, self.close = shared.node, shared.free
        self.piece = len(shared.arrays[0]) // 2
        self.places = [[part[: self.piece] for part in shared.arrays], [part[self.piece :] for part in shared.arrays]]

    def sum(self, values: NDArray[np.number], out: NDArray[np.number], what: str) -> None:
        """Elementwise sum over the ranks, bitwise equal on all. Collective.

        Args:
            values: [n], contiguous, of the same length and dtype on all ranks.
            out: [n], contiguous, of the same dtype; receives the sum; may be ``values``.
            what: completes "waited for the other ranks to ..." in an error.
        """
        count = self.piece // values.itemsize
        for begin in range(0, len(values), count):
            self._sum_piece(values[begin : begin + count], out[begin : begin + count], what)

    def _sum_piece(self, values: NDArray[np.number], out: NDArray[np.number], what: str) -> None:
        parts = [place[: values.nbytes].view(values.dtype) for place in self.places[0]]
        self.places.reverse()
        parts[self.node.rank][:] = values
        self.node.meet(what)
        if len(parts) == 2 or values.nbytes * len(parts) <= MOST_BYTES:
            sum_pairwise(parts, out)
            return
        own = slices(len(out), len(parts))[self.node.rank]
        add_pairwise([part[own] for part in parts], parts[0][own])
        self.node.meet(what)
        out[:] = parts[0]


def open_shm_window(group: Group) -> ShmWindow | None:
    """Opens a window; None, on all ranks, if the group spans several nodes or cannot share memory. Collective."""
    shared = share_on_node(group, 2 * PIECE, np.uint8)
    return ShmWindow(shared) if shared is not None else None


@dataclass(frozen=True)
class PieceCopy:
    """A part of a piece that other ranks need."""

    piece: int
    part: slice
    """Range in the flattened piece."""
    to: Array
    """Destination in shared memory."""


@dataclass(frozen=True)
class Sum:
    """A part of a piece that this rank sums."""

    piece: int
    part: slice
    """Range in the flattened piece."""
    boxes: list[Array]
    """This part in each rank's shared memory; this rank's own is read from the piece itself."""
    to: Array
    """Where all ranks of the node read the sum."""


class ShmPieces:
    """Sums several arrays over the ranks of a group; see PieceAllreduce and ``open_shm_pieces``.

    A rank copies to shared memory only what other ranks need of its arrays, reads its own slice where it is, and writes
    each sum once, to a place that all ranks of the node read.
    """

    def __init__(self, shared: SharedArrays, layout: Layout, shapes: Sequence[tuple[int, ...]]) -> None:
        """
        Args:
            shared: an array per rank of the node and one for the sums, each one element longer than the layout.
            layout, shapes: of the pieces except the slots, which form the last piece.
        """
        self.node, self.close = shared.node, shared.free
        *boxes, total = shared.arrays
        self.dtype = total.dtype
        spans = [slice(begin, begin + size) for begin, size in zip(layout.offsets, layout.sizes, strict=True)]
        spans.append(slice(layout.gradients, layout.length))
        own = self.node.rank
        mine = slices(layout.length, len(boxes))[own]
        self.copies = [
            PieceCopy(piece, slice(begin - span.start, end - span.start), boxes[own][begin:end])
            for piece, span in enumerate(spans)
            for begin, end in ((span.start, min(span.stop, mine.start)), (max(span.start, mine.stop), span.stop))
            if begin < end
        ]
        self.sums = [
            Sum(piece, slice(begin - span.start, end - span.start), [box[begin:end] for box in boxes], total[begin:end])
            for piece, span in enumerate(spans)
            for begin, end in chunks(max(span.start, mine.start), min(span.stop, mine.stop))
        ]
        self.between = between_nodes(shared.peers, total[mine])
        self.squares = [box[-1:] for box in boxes]
        """Squared norm of each rank's slice, stored after the pieces."""
        self.views = [total[span].reshape(shape) for span, shape in zip(spans, shapes, strict=False)]
        self.slots = total[spans[-1]]

    def sum(self, *pieces: Array) -> list[Array]:
        flat = [piece.reshape(-1) for piece in pieces]
        for copy in self.copies:
            np.copyto(copy.to, flat[copy.piece][copy.part])
        self.node.meet(ARRIVE)  # all have left what others need, and none reads the sums of the call before any more
        squared = 0.0
        for part in self.sums:
            terms = part.boxes.copy()
            terms[self.node.rank] = flat[part.piece][part.part]
            add_pairwise(terms, part.to, kept=self.node.rank)
            squared += self._square(part)  # while it is in the core's cache
        if self.between:
            self.between()
            squared = sum(map(self._square, self.sums))
        self.squares[self.node.rank][:] = squared
        self.node.meet(ADD)
        return [*self.views, with_square(self.slots, sum(float(square[0]) for square in self.squares))]

    def _square(self, part: Sum) -> float:
        return float(np.dot(part.to, part.to)) if part.piece < len(self.views) else 0.0


def open_shm_pieces(
    group: Group, layout: Layout, shapes: Sequence[tuple[int, ...]], dtype: DTypeLike
) -> ShmPieces | None:
    """Shares memory for pieces; None, on all ranks, if that is impossible (see ``share_arrays``). Collective."""
    shared = share_arrays(group, layout.length + 1, dtype, common=1)
    return ShmPieces(shared, layout, shapes) if shared else None


def with_square(slots: Array, square: float) -> Array:
    """A copy of the slots with the squared norm filled in."""
    filled = slots.copy()
    filled[SQUARE] = square
    return filled
