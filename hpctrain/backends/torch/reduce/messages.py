"""Sums of a flat tensor by messages that leave during backward: through torch's process groups, on GPUs from device to
device, or through Horovod."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType

import torch
from torch import Tensor

from hpctrain.backends.torch.device import gpu_for_nccl
from hpctrain.backends.torch.process_groups import ProcessGroup
from hpctrain.comm.group import Group
from hpctrain.errors import UserError
from hpctrain.reduce import horovod_setup
from hpctrain.reduce.flat_layout import Layout
from hpctrain.reduce.horovod_setup import Lease

HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
"""Dtypes of messages by ``reduce.compression``."""
POLL_S = 2e-4
"""Polling interval. Each poll stops Horovod's thread on this core, and so the sum on all ranks: with shorter intervals,
a sum of 20 MiB took 9.5 ms in place of 8.4."""
WHAT = "add up gradients"
"""Completes "waited for the other ranks to ..." in errors."""


class MessageAllreduce:
    """Few large messages with fixed bounds, so that timing changes no sum; see TensorAllreduce.

    Args:
        sender: sends them. Every rank makes the same calls in the same order.
        layout: layout of the flat tensor.
        dtype: dtype of the flat tensor.
        device: its device.
        half: dtype in which gradients are sent and summed, if not as they are; losses and weights are never rounded.
    """

    def __init__(
        self,
        sender: GroupSender | HorovodSender,
        layout: Layout,
        dtype: torch.dtype,
        device: torch.device,
        half: torch.dtype | None,
    ) -> None:
        self.send, self.close = sender.send, sender.close
        self.layout, self.gradients = layout, layout.gradients
        self.flat = torch.zeros(layout.length, dtype=dtype, device=device)
        self.elsewhere: dict[int, Tensor] = {}
        """See FlatGradients."""
        self.half = torch.zeros(layout.gradients, dtype=half, device=device) if half else None
        self.waits: list[Callable[[], object]] = []

    def start(self, begin: int, end: int) -> None:
        if self.half is None:
            for first, last in self.layout.messages(begin, end):
                self.waits.append(self.send(self.elsewhere.get(first, self.flat[first:last]), first))
            return
        part = slice(begin, min(end, self.gradients))
        self.half[part].copy_(self.flat[part])
        self.waits.append(self.send(self.half[part], begin))
        if end > self.gradients:
            self.waits.append(self.send(self.flat[self.gradients :], self.gradients))

    def finish(self) -> None:
        for wait in self.waits:
            wait()
        self.waits.clear()
        if self.half is not None:
            self.flat[: self.gradients].copy_(self.half)


class GroupSender:
    """Sends through a process group; the host waits for no message on a GPU."""

    def __init__(self, peers: ProcessGroup) -> None:
        self.peers, self.close = peers, peers.close

    def send(self, part: Tensor, begin: int) -> Callable[[], object]:
        """Starts the sum of a part of the flat tensor from ``begin`` on, in place, once its values are there; returns a
        function that waits for the sum."""
        return self.peers.sum(part, WHAT)


class HorovodSender:
    """Sends by Horovod, under fixed names, so that nothing is renegotiated.

    Args:
        lease: this use of Horovod.
        group: the ranks.
        elements: elements of all tensors together, if several are sent per update.
    """

    def __init__(self, lease: Lease, group: Group, elements: int = 0) -> None:
        self.horovod = lease.module
        self.number = lease.number
        self.most = lease.most
        self.group = group
        self.elements, self.apart = elements, lease.apart
        self.close = lease.end

    def send(self, part: Tensor, begin: int) -> Callable[[], object]:
        """See GroupSender."""
        most = self.most(max(self.elements, len(part)), part.element_size(), horovod_setup.TORCH_MESSAGE_BYTES)
        handles = [
            # A group of one: groups are not fused with each other (horovod_setup.SETTINGS).
            self.horovod.grouped_allreduce_async_(
                [piece], name=f"hpctrain.gradients.{self.number}.{begin + number * most}", op=self.horovod.Sum
            )
            for number, piece in enumerate(part.split(most))
        ]

        def wait() -> None:
            for handle in handles:
                self.group.wait_until(partial(self.horovod.poll, handle), WHAT, pause_s=POLL_S)
                self.horovod.synchronize(handle)

        return wait


def unfit(horovod: ModuleType, group: Group, device: torch.device) -> UserError | None:
    """The reason why Horovod cannot sum tensors on this device, if any; the same on all ranks. Collective."""
    on_gpu = device.type != "cpu"
    for_cpus = on_gpu and not (horovod.cuda_built() or horovod.rocm_built())
    gpu = gpu_for_nccl(device) if on_gpu and horovod.nccl_built() else None
    everywhere = group.allgather([for_cpus, gpu], "compare GPUs")
    if any(for_cpus for for_cpus, _ in everywhere):  # it would read values before they are written, and then hang
        return UserError(
            "Horovod was built for CPUs, but the model is on a GPU",
            f"leave reduce.kind out: PyTorch's own NCCL needs no build; or {horovod_setup.BUILD} --gpu --force",
        )
    gpus = [gpu for _, gpu in everywhere if gpu]
    if len(set(gpus)) < len(gpus):
        return UserError("ranks share a GPU, which NCCL refuses", "start one rank per GPU, or set reduce.kind: mpi")
    return None


def horovod_sender(group: Group, device: torch.device, elements: int = 0) -> HorovodSender:
    """Starts Horovod; raises UserError if it is missing or does not fit. Collective.

    ``elements``: see HorovodSender.
    """
    horovod = horovod_setup.load("torch")
    if error := unfit(horovod, group, device):
        raise error
    return HorovodSender(horovod_setup.start(horovod, group, on_gpu=device.type != "cpu"), group, elements)
