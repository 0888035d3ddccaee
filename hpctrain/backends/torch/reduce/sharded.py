"""Sums of a flat tensor where they are needed: each rank gets those of its range, and sends all what it made of them.

Through host memory, or by a process group of torch: on GPUs from device to device, during backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from hpctrain.backends.torch import accelerator
from hpctrain.backends.torch.process_groups import ProcessGroup, is_left_open
from hpctrain.backends.torch.reduce.sharded_exchange import SEND, ShardedExchange
from hpctrain.backends.torch.reduce.slots import Number, fill_slots
from hpctrain.reduce.flat_layout import SQUARE, Layout

SUM = "add up slices of gradients"
"""Completes "waited for the other ranks to ..." in errors."""


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
        if not is_left_open(self.flat.device):
            accelerator.synchronize(self.flat.device)
            accelerator.unpin(self.staging.data_ptr(), self.flat.device)
        self.host.close()


class GroupSharded:
    """By a process group: buckets are summed at their owners during backward. Ranges may differ in length, which gloo's
    reduce-scatter and gather do not allow; these send as many bytes as theirs would."""

    def __init__(
        self, peers: ProcessGroup, layout: Layout, ranges: Sequence[slice], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.peers = peers
        self.ranges = ranges
        self.close = peers.close
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
