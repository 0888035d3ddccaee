"""Gradients to the rank that updates, parameters back to all: reduce-scatter and allgather of a flat host buffer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from hpctrain.comm.group import Group
from hpctrain.reduce.exchange_slots import SQUARE
from hpctrain.reduce.mpi_allreduce import LARGEST_MESSAGE, duplicate
from hpctrain.reduce.shm_allreduce import ADD, ARRIVE, SharedArrays, add_pairwise, chunks, share_arrays

UPDATE, TAKE = "update their parameters", "take over updated parameters"
"""What a rank waits for."""


class ShardedExchange(Protocol):
    """Every rank makes the same calls in the same order."""

    @property
    def buffer(self) -> NDArray[Any]:
        """This rank's gradients, slots at the end; after ``scatter`` its range holds sums, as all slots do."""

    @property
    def sources(self) -> Sequence[NDArray[Any]]:
        """Between ``gather`` and ``release``: by rank, a buffer whose range of that rank is what the rank had there."""

    def scatter(self) -> None:
        """Sums all ranks' gradients, each rank its own range, and the slots; SQUARE is that of the whole gradient."""

    def gather(self) -> None:
        """Returns when the ranges of all ranks can be read in ``sources``."""

    def release(self) -> None:
        """They are no longer read."""

    def close(self) -> None:
        """Releases communicators."""


class ShmSharded:
    """Ranks of one node, through memory that they share."""

    def __init__(self, shared: SharedArrays, length: int, gradients: int, ranges: Sequence[slice]) -> None:
        """
        Args:
            shared: an array for each rank, longer by one than the buffer.
            length: elements of the buffer.
            gradients: elements before the slots.
            ranges: of the gradients, by rank.
        """
        self.node = shared.node
        self.shared = shared
        self.sources = [array[:length] for array in shared.arrays]
        self.squares = [array[length:] for array in shared.arrays]
        """Of each rank's range. No slots: those are written anew while others may still read these."""
        self.buffer = self.sources[self.node.rank]
        self.mine = ranges[self.node.rank]
        self.gradients = gradients

    def scatter(self) -> None:
        self.node.meet(ARRIVE)
        first, own = self.sources[0], self.buffer
        squared = 0.0
        for begin, end in chunks(self.mine.start, self.mine.stop):
            add_pairwise([source[begin:end] for source in self.sources], first[begin:end])
            own[begin:end] = first[begin:end]
            squared += float(np.dot(own[begin:end], own[begin:end]))  # while they are in the core's cache
        slots = [source[self.gradients :].copy() for source in self.sources]
        add_pairwise(slots, slots[0])
        self.squares[self.node.rank][0] = squared
        self.node.meet(ADD)
        own[self.gradients :] = slots[0]
        own[self.gradients + SQUARE] = math.fsum(float(square[0]) for square in self.squares)

    def gather(self) -> None:
        self.node.meet(UPDATE)

    def release(self) -> None:
        self.node.meet(TAKE)

    def close(self) -> None:
        self.shared.free()


class MpiSharded:
    """Any ranks, by messages of MPI."""

    def __init__(self, group: Group, length: int, gradients: int, dtype: DTypeLike, ranges: Sequence[slice]) -> None:
        self.comm = duplicate(group)
        self.buffer = np.zeros(length, dtype)
        self.values, self.slots = self.buffer[:gradients], self.buffer[gradients:]
        self.sources = [self.buffer] * group.size
        self.ranges = ranges
        self.counts = [part.stop - part.start for part in ranges]
        self.own = self.values[ranges[group.rank]]
        self.sums = np.empty_like(self.own)

    def scatter(self) -> None:
        from mpi4py import MPI

        if len(self.values) <= LARGEST_MESSAGE:
            self.comm.Reduce_scatter(self.values, self.sums, self.counts)
        else:
            for owner, begin, end in self._messages():
                place = self.sums[begin - self.ranges[owner].start :][: end - begin]
                self.comm.Reduce(self.values[begin:end], place if owner == self.comm.rank else None, root=owner)
        self.own[:] = self.sums
        self.slots[SQUARE] = np.dot(self.own, self.own)
        self.comm.Allreduce(MPI.IN_PLACE, self.slots)

    def gather(self) -> None:
        from mpi4py import MPI

        if len(self.values) <= LARGEST_MESSAGE:
            self.comm.Allgatherv(MPI.IN_PLACE, [self.values, self.counts])
        else:
            for owner, begin, end in self._messages():
                self.comm.Bcast(self.values[begin:end], root=owner)

    def release(self) -> None:
        """Each rank has a buffer of its own."""

    def close(self) -> None:
        self.comm.Free()

    def _messages(self) -> list[tuple[int, int, int]]:
        """(owner, begin, end) of parts that MPI can count."""
        return [
            (owner, begin, min(begin + LARGEST_MESSAGE, part.stop))
            for owner, part in enumerate(self.ranges)
            for begin in range(part.start, part.stop, LARGEST_MESSAGE)
        ]


def open_sharded_exchange(
    group: Group, length: int, gradients: int, dtype: DTypeLike, ranges: Sequence[slice]
) -> ShardedExchange:
    """Through shared memory if the ranks are those of one node, else by MPI. Collective.

    Args:
        group: the ranks.
        length: elements of the buffer, the slots of exchange_slots.py at its end.
        gradients: elements before the slots.
        dtype: of the buffer.
        ranges: of the gradients, by rank.
    """
    shared = share_arrays(group, length + 1, dtype)
    if shared is not None and shared.peers is None:
        return ShmSharded(shared, length, gradients, ranges)
    if shared is not None:
        shared.free()
    return MpiSharded(group, length, gradients, dtype, ranges)
