"""Sends gradients to the rank that updates, and parameters back to all: reduce-scatter and allgather of a flat host
buffer, through shared memory (``ShmSharded``) or by MPI (``MpiSharded``)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

from hpctrain.comm.group import Group
from hpctrain.reduce.flat_layout import SQUARE
from hpctrain.reduce.mpi_allreduce import LARGEST_MESSAGE, duplicate
from hpctrain.reduce.shm_allreduce import ADD, ARRIVE, SharedArrays, add_pairwise, chunks, share_on_node

SEND = "update their parameters"
"""Completes "waited for the other ranks to ..." in errors."""


class ShmSharded:
    """Exchange between the ranks of one node through shared memory. Every rank makes the same calls in the same order.

    A rank reads and writes its own range in the buffers of all ranks: first their gradients, then its updated
    parameters. No barrier follows a sum or a read: what is written next is not read before the next barrier.
    """

    def __init__(self, shared: SharedArrays, length: int, gradients: int, ranges: Sequence[slice]) -> None:
        """
        Args:
            shared: an array per rank, one element longer than the buffer.
            length: elements of the buffer.
            gradients: elements before the slots.
            ranges: range of the gradients for each rank.
        """
        self.shared, self.node = shared, shared.node
        self.buffers = [array[:length] for array in shared.arrays]
        self.squares = [array[length:] for array in shared.arrays]
        """Squared norm of each rank's range. Not in the slots, which change while others may still read this."""
        self.buffer = self.buffers[self.node.rank]
        """This rank's gradients, slots at the end; after ``scatter`` its range holds sums."""
        self.leaving = [buffer for rank, buffer in enumerate(self.buffers) if rank != self.node.rank]
        """Laid out as the gradients. This rank writes its range of the parameters to each of them before ``gather``,
        after which ``buffer`` has those of the other ranks."""
        self.mine = ranges[self.node.rank]
        self.gradients = gradients
        self.slots = self.buffer[gradients:].copy()
        """The sums of the slots, after ``scatter``."""

    def scatter(self, needs_norm: bool) -> None:
        """Sums gradients over all ranks, each rank its own range, and the slots.

        If the norm is needed, SQUARE is set to the squared norm of the whole sum. If it is not, call ``gather`` before
        writing this rank's gradients again: until then, other ranks may read them.
        """
        self.node.meet(ARRIVE)
        own = self.buffer
        total = own if self.node.rank < 2 else self.buffers[0]  # the first two terms are read before the sum is written
        squared = 0.0
        for begin, end in chunks(self.mine.start, self.mine.stop):
            add_pairwise([buffer[begin:end] for buffer in self.buffers], total[begin:end])
            if total is not own:
                own[begin:end] = total[begin:end]
            if needs_norm:
                squared += float(np.dot(own[begin:end], own[begin:end]))  # while it is in the core's cache
        slots = [buffer[self.gradients :].copy() for buffer in self.buffers]
        add_pairwise(slots, slots[0])
        self.squares[self.node.rank][0] = squared
        if needs_norm:
            self.node.meet(ADD)
            slots[0][SQUARE] = math.fsum(float(square[0]) for square in self.squares)
        self.slots = slots[0]

    def gather(self) -> None:
        """Returns when ``buffer`` holds the parameters of all other ranks, in their ranges."""
        self.node.meet(SEND)

    def close(self) -> None:
        """Releases communicators."""
        self.shared.free()


class MpiSharded:
    """The same exchange between any ranks, by MPI messages."""

    def __init__(self, group: Group, length: int, gradients: int, dtype: DTypeLike, ranges: Sequence[slice]) -> None:
        self.comm = duplicate(group)
        self.buffer = np.zeros(length, dtype)
        self.values, self.slots = self.buffer[:gradients], self.buffer[gradients:]
        self.leaving = [self.values]
        self.ranges = ranges
        self.own = self.values[ranges[group.rank]]
        self.sums = np.empty_like(self.own)

    def scatter(self, needs_norm: bool) -> None:
        from mpi4py import MPI

        filled = 0
        for values, counts in self._messages():
            own = counts[self.comm.rank]
            self.comm.Reduce_scatter(values, self.sums[filled : filled + own], counts)
            filled += own
        self.own[:] = self.sums
        if needs_norm:
            self.slots[SQUARE] = np.dot(self.own, self.own)
        self.comm.Allreduce(MPI.IN_PLACE, self.slots)

    def gather(self) -> None:
        from mpi4py import MPI

        for values, counts in self._messages():
            self.comm.Allgatherv(MPI.IN_PLACE, [values, counts])

    def close(self) -> None:
        self.comm.Free()

    def _messages(self) -> Iterator[tuple[NDArray[Any], list[int]]]:
        """Parts that MPI can count, in order, with the number of each rank's elements."""
        for begin in range(0, len(self.values), LARGEST_MESSAGE):
            values = self.values[begin : begin + LARGEST_MESSAGE]
            end = begin + len(values)
            yield values, [max(0, min(one.stop, end) - max(one.start, begin)) for one in self.ranges]


ShardedExchange: TypeAlias = ShmSharded | MpiSharded


def open_sharded_exchange(
    group: Group, length: int, gradients: int, dtype: DTypeLike, ranges: Sequence[slice]
) -> ShardedExchange:
    """Opens an exchange: through shared memory if all ranks are on one node, else by MPI. Collective.

    Args:
        group: the ranks.
        length: elements of the buffer, including the extra slots of flat_layout.py at its end.
        gradients: elements before the slots.
        dtype: dtype of the buffer.
        ranges: range of the gradients for each rank.
    """
    shared = share_on_node(group, length + 1, dtype)
    if shared:
        return ShmSharded(shared, length, gradients, ranges)
    return MpiSharded(group, length, gradients, dtype, ranges)
