"""Sums of a flat tensor where they are needed: each rank gets those of its range, and sends all what it made of them.

Through host memory (``ShmSharded`` on one node, else ``MpiSharded``), or by a process group of torch: on GPUs from
device to device, during backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

from hpctrain.backends.torch import accelerator
from hpctrain.backends.torch.process_groups import ProcessGroup
from hpctrain.backends.torch.reduce.slots import Number, fill_slots
from hpctrain.comm.group import Group
from hpctrain.reduce.flat_layout import SQUARE, Layout
from hpctrain.reduce.mpi_allreduce import LARGEST_MESSAGE, duplicate
from hpctrain.reduce.shm_allreduce import ADD, ARRIVE, SharedArrays, add_pairwise, chunks, share_on_node

SUM, SEND = "add up slices of gradients", "update their parameters"
"""Each completes "waited for the other ranks to ..." in errors."""


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


class HostSharded:
    """For tensors on the CPU, which share memory with the host's buffer. Every rank makes the same calls in the same
    order."""

    def __init__(self, host: ShardedExchange, layout: Layout) -> None:
        self.host = host
        self.flat = torch.from_numpy(host.buffer)
        """This rank's gradients and slots. After ``scatter`` its range holds sums; after ``gather`` the other ranges
        hold what their ranks wrote to ``leaving``."""
        self.leaving = [torch.from_numpy(one) for one in host.leaving]
        """Laid out as ``flat``; this rank writes to its range in each of them before ``gather``."""
        self.slots = self.flat[layout.gradients :]
        self.gather, self.close = host.gather, host.close

    def start(self, begin: int, end: int) -> None:
        """These elements are complete and may be sent; here, everything is sent at once."""

    def scatter(self, loss: Number, weight: Number | None, needs_norm: bool) -> list[float]:
        """Sums each range; returns the summed slots, with the squared norm of all sums if it is needed."""
        fill_slots(self.slots.zero_(), loss, weight)
        self.host.scatter(needs_norm)
        slots: list[float] = self.host.slots.tolist()
        return slots


class StagedSharded(HostSharded):
    """For tensors on a GPU that ranks share: copied through page-locked memory."""

    def __init__(self, host: ShardedExchange, layout: Layout, mine: slice, device: torch.device) -> None:
        super().__init__(host, layout)
        self.staging, self.copies, self.mine = self.flat, self.leaving, mine
        accelerator.pin(self.staging, device)
        self.flat = torch.zeros_like(self.staging, device=device)
        self.leaving = [self.flat]
        self.gather, self.close = self._gather, self._close

    def scatter(self, loss: Number, weight: Number | None, needs_norm: bool) -> list[float]:
        self.staging.copy_(self.flat)
        slots = super().scatter(loss, weight, needs_norm)
        self.flat[self.mine].copy_(self.staging[self.mine])
        return slots

    def _gather(self) -> None:
        mine = self.mine
        self.staging[mine].copy_(self.flat[mine])
        for copy in self.copies:
            if copy.data_ptr() != self.staging.data_ptr():
                copy[mine] = self.staging[mine]
        self.host.gather()
        for theirs in (slice(0, mine.start), slice(mine.stop, len(self.staging))):
            self.flat[theirs].copy_(self.staging[theirs])

    def _close(self) -> None:
        accelerator.synchronize(self.flat.device)
        accelerator.unpin(self.staging.data_ptr(), self.flat.device)
        self.host.close()


class GroupSharded:
    """By a process group: buckets are summed at their owners during backward. Ranges may differ in length, which gloo's
    reduce-scatter and gather do not allow; these send as many bytes as theirs would."""

    def __init__(
        self, peers: ProcessGroup, layout: Layout, ranges: Sequence[slice], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.peers, self.ranges, self.close = peers, ranges, peers.close
        self.flat = torch.zeros(layout.length, dtype=dtype, device=device)
        self.leaving = [self.flat]
        self.own, self.slots = self.flat[ranges[peers.group.rank]], self.flat[layout.gradients :]
        self.waits: list[Callable[[], object]] = []

    def start(self, begin: int, end: int) -> None:
        for owner, whole in enumerate(self.ranges):
            part = self.flat[max(begin, whole.start) : min(end, whole.stop)]
            if part.numel():
                self.waits.append(self.peers.reduce(part, owner, SUM))

    def scatter(self, loss: Number, weight: Number | None, needs_norm: bool) -> list[float]:
        self._wait()
        fill_slots(self.slots.zero_(), loss, weight)
        if needs_norm:
            self.slots[SQUARE] = torch.linalg.vector_norm(self.own).square()
        self.peers.sum(self.slots, SUM)()
        slots: list[float] = self.slots.tolist()
        return slots

    def gather(self) -> None:
        whole = enumerate(self.flat[part] for part in self.ranges)
        self.waits = [self.peers.broadcast(part, owner, SEND) for owner, part in whole if part.numel()]
        self._wait()

    def _wait(self) -> None:
        for wait in self.waits:
            wait()
        self.waits.clear()


TensorSharded: TypeAlias = HostSharded | GroupSharded
