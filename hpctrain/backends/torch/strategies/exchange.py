"""Exchanges of tensors between ranks that hold parts of a PyTorch model: through host memory, or by a torch process
group, which sends tensors from GPU to GPU."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Protocol, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from hpctrain.backends.torch.process_groups import ProcessGroup, have_own_gpus, peers_of
from hpctrain.comm.group import TIMEOUT_S, Group
from hpctrain.reduce.shm_allreduce import ShmWindow, open_shm_window
from hpctrain.train.clock import Waiting


class Messages(Protocol):
    """Sends tensors of any device between two ranks of a group. ``what`` completes "waited for the other ranks to ..."
    in the RunFailed that a timeout raises."""

    @property
    def in_order(self) -> bool:
        """Whether two ranks must start the messages between them, in both directions, in the same order."""

    def post(self, values: Tensor, rank: int, tag: int) -> None:
        """Starts sending a tensor, which must not change until ``settle``. The other rank calls ``expect``."""

    def expect(self, into: Tensor, rank: int, tag: int) -> Callable[[str], None]:
        """Starts receiving a posted tensor into a contiguous one; returns a function of ``what`` that waits for it."""

    def settle(self, what: str) -> None:
        """Waits until posted tensors may be changed or freed."""


class Exchange(Messages, Protocol):
    """Exchanges tensors of any device within a group; ``what`` as for Messages."""

    @property
    def adds_halves(self) -> bool:
        """Whether ``sum`` adds 16-bit values."""

    def sum(self, values: Tensor, dtype: torch.dtype, what: str) -> Tensor:
        """A new tensor of this dtype, the sum over the ranks, bitwise equal on all of them. Collective."""

    def scatter(self, values: Tensor, dtype: torch.dtype, what: str) -> Tensor:
        """A new tensor, this rank's of equal parts of the sum along the first axis. Collective."""

    def gather(self, values: Tensor, what: str) -> list[Tensor]:
        """New tensors, one from each rank, all of the same shape. Collective."""

    def close(self) -> None:
        """Closes the exchange on this rank."""


OpenExchange: TypeAlias = Callable[[Group, torch.device, Waiting], Exchange]
"""Opens an exchange for tensors on a device. Collective."""


class HostExchange:
    """An exchange through host memory; see Exchange.

    Args:
        group: the ranks.
        waiting: records waits for other ranks.
        window: shared memory for sums; None: sums go by MPI, as everything else.
    """

    in_order = adds_halves = False

    def __init__(self, group: Group, waiting: Waiting, window: ShmWindow | None = None) -> None:
        self.group, self.waiting, self.window = group, waiting, window
        self.under_way: list[Callable[[], bool]] = []
        """Tests for each posted message whether it has been sent."""

    def sum(self, values: Tensor, dtype: torch.dtype, what: str) -> Tensor:
        own = values.detach().to("cpu", dtype).resolve_conj().resolve_neg().contiguous()
        total = torch.empty(own.shape, dtype=dtype, device="cpu")
        with self.waiting:
            if self.window:
                self.window.sum(own.view(-1).numpy(), total.view(-1).numpy(), what)
            else:
                self.group.add(total.copy_(own).numpy(), what)
        return total.to(values.device)

    def scatter(self, values: Tensor, dtype: torch.dtype, what: str) -> Tensor:
        return self.sum(values, dtype, what).chunk(self.group.size)[self.group.rank].clone()

    def gather(self, values: Tensor, what: str) -> list[Tensor]:
        own = host_bytes(values)
        with self.waiting:
            everything = torch.from_numpy(self.group.gather(own, what))
        return [like(values, one) for one in everything]

    def post(self, values: Tensor, rank: int, tag: int) -> None:
        self.under_way = [sent for sent in self.under_way if not sent()]
        if values.numel():
            self.under_way.append(self.group.post(host_bytes(values), rank, tag))

    def expect(self, into: Tensor, rank: int, tag: int) -> Callable[[str], None]:
        def fetch(what: str) -> None:
            if not into.numel():  # nothing was posted
                return
            host = into if into.device.type == "cpu" else torch.empty_like(into, device="cpu")
            with self.waiting:
                self.group.fetch(host_bytes(host), rank, tag, what)
            if host is not into:
                into.copy_(host)

        return fetch

    def settle(self, what: str) -> None:
        """Does nothing: MPI progresses messages whenever a rank waits, and keeps their memory until then."""

    def close(self) -> None:
        if self.window:
            self.window.close()
            self.window = None


def host_bytes(tensor: Tensor) -> NDArray[np.uint8]:
    """A tensor's bytes as a flat host array; over the same memory if the tensor is contiguous on the host."""
    values: NDArray[np.uint8] = bytes_of(tensor.to("cpu")).numpy()
    return values


def bytes_of(tensor: Tensor) -> Tensor:
    """A tensor's bytes, flat, on its own device."""
    values = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return values.as_strided((values.numel(),), (1,)).view(torch.uint8)  # a single value may have any stride


def like(values: Tensor, row: Tensor) -> Tensor:
    """A tensor with the shape, dtype and device of ``values``, from its bytes."""
    if not values.numel():
        return torch.empty_like(values)
    return row.view(values.dtype).view(values.shape).to(values.device)


class TorchExchange:
    """An exchange by a torch process group; see Exchange.

    Results can be used as soon as a method returns. A rank may have several messages on their way. NCCL
    processes all messages of a rank in one queue, and a message ends only when the other rank reaches it in its own
    queue; hence ``in_order``.

    On GPUs, only the stream that computes waits for an operation. The host continues, and may be a whole pass ahead;
    the monitor reports an operation that never ends. On CPUs, each wait has a timeout, and its time is recorded.

    Args:
        peers: process group of the ranks.
        waiting: records waits for other ranks.
        timeout_s: longest wait for another rank.
    """

    in_order = adds_halves = True

    def __init__(self, peers: ProcessGroup, waiting: Waiting, timeout_s: float = TIMEOUT_S) -> None:
        self.peers, self.waiting = peers, waiting
        self.group, self.ranks, self.device = peers.group, peers.ranks, peers.device
        self.timeout = timedelta(seconds=timeout_s)
        self.under_way: list[tuple[dist.Work, Tensor]] = []
        """Messages on their way, with the bytes that are sent."""

    def sum(self, values: Tensor, dtype: torch.dtype, what: str) -> Tensor:
        total = values.detach().to(dtype, copy=True, memory_format=torch.contiguous_format)
        if total.numel():
            parts = torch.view_as_real(total) if total.is_complex() else total
            self._finish(lambda: self.ranks.allreduce([parts]), what)
        return total

    def scatter(self, values: Tensor, dtype: torch.dtype, what: str) -> Tensor:
        own = values.detach().to(dtype).contiguous()
        total = own.new_empty((len(own) // self.group.size, *own.shape[1:]))
        if total.numel():
            self._finish(lambda: self.ranks._reduce_scatter_base(total, own), what)
        return total

    def gather(self, values: Tensor, what: str) -> list[Tensor]:
        own = bytes_of(values)
        everything = own.new_empty(self.group.size, own.numel())
        if own.numel():
            self._finish(lambda: self.ranks._allgather_base(everything.view(-1), own), what)
        return [like(values, one) for one in everything]

    def post(self, values: Tensor, rank: int, tag: int) -> None:
        with self.peers.explained("take what was sent"):
            while self.under_way and self.under_way[0][0].is_completed():
                self.under_way[0][0].wait(self.timeout)  # returns at once; raises errors
                self.under_way.pop(0)  # frees memory early, since an update may have many micro-batches
            if values.numel():
                own = bytes_of(values)
                self.under_way.append((self.ranks.send([own], rank, 0), own))

    def expect(self, into: Tensor, rank: int, tag: int) -> Callable[[str], None]:
        if not into.numel():
            return lambda what: None
        with self.peers.explained("send something"):
            work = self.ranks.recv([into.view(-1).view(torch.uint8)], rank, 0)
        return lambda what: self._finish(lambda: work, what)

    def settle(self, what: str) -> None:
        while self.under_way:
            work, _ = self.under_way[0]
            self._finish(lambda work=work: work, what)  # type: ignore[misc]
            self.under_way.pop(0)

    def close(self) -> None:
        self.peers.close()

    def _finish(self, begin: Callable[[], dist.Work], what: str) -> None:
        """Begins an operation and waits for it."""
        with self.waiting, self.peers.explained(what):
            work = begin()
            work.wait(*[self.timeout] * (self.device.type == "cpu"))  # with a timeout, the host waits


def over_torch(group: Group, device: torch.device, waiting: Waiting, timeout_s: float = TIMEOUT_S) -> TorchExchange:
    """Opens an exchange by NCCL for ranks with a GPU each, or by gloo for tensors on the host. See OpenExchange.

    Raises UserError, on all ranks, if they cannot reach each other.
    """
    return TorchExchange(peers_of(group, device, timeout_s), waiting, timeout_s)


def exchange_for(group: Group, device: torch.device, waiting: Waiting) -> Exchange:
    """Opens an exchange by NCCL if each rank has its own GPU, else through host memory. See OpenExchange."""
    if group.size > 1 and device.type != "cpu" and have_own_gpus(group, device):
        return over_torch(group, device, waiting)
    return HostExchange(group, waiting, open_shm_window(group))
