"""Exchanges of tensors between ranks that hold parts of a PyTorch model: through host memory, or by a torch process
group, which sends tensors from GPU to GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.backends.torch.process_groups import ProcessGroup, have_own_gpus, peers_of
from hpctrain.comm.group import TIMEOUT_S, Group
from hpctrain.comm.imagined import Imagined
from hpctrain.reduce.shm_allreduce import ShmWindow, open_shm_window
from hpctrain.system.array_types import Bytes
from hpctrain.train.clock import Waiting


@dataclass(eq=False)
class HostExchange:
    """Exchanges tensors of any device within a group through host memory.

    ``what`` completes "waited for the other ranks to ..." in the RunFailed that a timeout raises.
    """

    in_order = False
    """Whether two ranks must start the messages between them, in both directions, in the same order."""
    adds_halves = False
    """Whether ``sum`` adds 16-bit values."""

    group: Group
    """The ranks."""
    waiting: Waiting
    """Records waits for other ranks."""
    window: ShmWindow | None = None
    """Shared memory for sums; None: sums go by MPI, as everything else."""
    under_way: list[Callable[[], bool]] = field(default_factory=list)
    """Tests for each posted message whether it has been sent."""

    def sum(self, values: Tensor, dtype: torch.dtype, what: str) -> Tensor:
        """A new tensor of this dtype, the sum over the ranks, bitwise equal on all of them. Collective."""
        own = values.detach().to("cpu", dtype).resolve_conj().resolve_neg().contiguous()
        total = torch.empty(own.shape, dtype=dtype, device="cpu")
        with self.waiting:
            if self.window:
                self.window.sum(own.view(-1).numpy(), total.view(-1).numpy(), what)
            else:
                self.group.add(total.copy_(own).numpy(), what)
        return total.to(values.device)

    def scatter(self, values: Tensor, dtype: torch.dtype, what: str) -> Tensor:
        """A new tensor, this rank's of equal parts of the sum along the first axis. Collective."""
        return self.sum(values, dtype, what).chunk(self.group.size)[self.group.rank].clone()

    def gather(self, values: Tensor, what: str) -> list[Tensor]:
        """New tensors, one from each rank, all of the same shape. Collective."""
        own = host_bytes(values)
        with self.waiting:
            everything = torch.from_numpy(self.group.gather(own, what))
        return [like(values, one) for one in everything]

    def post(self, values: Tensor, rank: int, tag: int) -> None:
        """Starts sending a tensor, which must not change until ``settle``. The other rank calls ``expect``."""
        self.under_way = [sent for sent in self.under_way if not sent()]
        if values.numel():
            self.under_way.append(self.group.post(host_bytes(values), rank, tag))

    def expect(self, into: Tensor, rank: int, tag: int) -> Callable[[str], None]:
        """Starts receiving a posted tensor into a contiguous one; returns a function of ``what`` that waits for it."""

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
        """Waits until posted tensors may be changed or freed: here at once, since MPI keeps their memory meanwhile."""

    def close(self) -> None:
        if self.window:
            self.window.close()
            self.window = None


def host_bytes(tensor: Tensor) -> Bytes:
    """A tensor's bytes as a flat host array; over the same memory if the tensor is contiguous on the host."""
    values: Bytes = bytes_of(tensor.to("cpu")).numpy()
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
    """The same by a torch process group.

    Results can be used as soon as a method returns. A rank may have several messages on their way. NCCL
    processes all messages of a rank in one queue, and a message ends only when the other rank reaches it in its own
    queue; hence ``in_order``.

    On GPUs, only the stream that computes waits for an operation. The host continues, and may be a whole pass ahead;
    the monitor reports an operation that never ends. On CPUs, each wait has a timeout, and its time is recorded.

    Args:
        peers: process group of the ranks.
        waiting: records waits for other ranks.
    """

    in_order = adds_halves = True

    def __init__(self, peers: ProcessGroup, waiting: Waiting) -> None:
        self.peers, self.waiting = peers, waiting
        self.group, self.ranks = peers.group, peers.ranks
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
                self.under_way[0][0].wait()  # returns at once; raises errors
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
        with self.waiting:
            self.peers.started(begin, what)()


Exchange: TypeAlias = HostExchange | TorchExchange


def over_torch(group: Group, device: torch.device, waiting: Waiting, timeout_s: float = TIMEOUT_S) -> TorchExchange:
    """Opens an exchange by NCCL for ranks with a GPU each, or by gloo for tensors on the host. Collective.

    Raises UserError, on all ranks, if they cannot reach each other.
    """
    return TorchExchange(peers_of(group, device, timeout_s), waiting)


def exchange_for(group: Group, device: torch.device, waiting: Waiting) -> Exchange:
    """Opens an exchange by NCCL if each rank has its own GPU, else through host memory. Collective."""
    if isinstance(group, Imagined):
        return HostExchange(group, waiting)
    if group.size > 1 and device.type != "cpu" and have_own_gpus(group, device):
        return over_torch(group, device, waiting)
    return HostExchange(group, waiting, open_shm_window(group))
