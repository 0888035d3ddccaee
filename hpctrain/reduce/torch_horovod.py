"""Sums of a flat torch tensor over ranks, by Horovod: NCCL on GPUs if it was built for that, MPI otherwise."""

from __future__ import annotations

import time
from types import ModuleType

import torch
from torch import Tensor

from hpctrain.comm.group import Group
from hpctrain.errors import UserError
from hpctrain.reduce import horovod_setup
from hpctrain.reduce.horovod_setup import Lease
from hpctrain.reduce.layout import Layout

POLL_S = 2e-4
"""Horovod's own wait looks once a millisecond."""


class HorovodAllreduce:
    """Few large messages of fixed names and bounds: nothing is negotiated again, and timing changes no sum."""

    def __init__(self, lease: Lease, layout: Layout, dtype: torch.dtype, device: torch.device, half: bool) -> None:
        self.lease = lease
        self.horovod = lease.module
        self.gradients = layout.gradients
        self.flat = torch.zeros(layout.length, dtype=dtype, device=device)
        self.half = torch.zeros(layout.gradients, dtype=torch.float16, device=device) if half else None
        self.handles: list[int] = []

    def start(self, begin: int, end: int) -> None:
        if self.half is None:
            self._send(self.flat[begin:end], begin)
            return
        part = slice(begin, min(end, self.gradients))
        self.half[part].copy_(self.flat[part])
        self._send(self.half[part], begin)
        if end > self.gradients:  # losses and weights keep fp32's precision
            self._send(self.flat[self.gradients :], self.gradients)

    def finish(self) -> None:
        for handle in self.handles:
            while not self.horovod.poll(handle):
                time.sleep(POLL_S)
            self.horovod.synchronize(handle)
        self.handles.clear()
        if self.half is not None:
            self.flat[: self.gradients].copy_(self.half)

    def close(self) -> None:
        """Gives up its use of Horovod."""
        self.lease.end()

    def _send(self, part: Tensor, begin: int) -> None:
        # A group of its own: groups are not fused (horovod_setup.SETTINGS).
        name = f"hpctrain.gradients.{self.lease.number}.{begin}"
        self.handles.append(self.horovod.grouped_allreduce_async_([part], name=name, op=self.horovod.Sum))


def unfit(horovod: ModuleType, group: Group, device: torch.device) -> UserError | None:
    """What keeps Horovod from summing tensors of this device, the same on all ranks. Collective over the group."""
    on_gpu = device.type == "cuda"
    for_cpus = on_gpu and not (horovod.cuda_built() or horovod.rocm_built())
    gpu = str(torch.cuda.get_device_properties(device).uuid) if on_gpu and horovod.nccl_built() else None
    everywhere = group.allgather([for_cpus, gpu], "compare GPUs")
    if any(for_cpus for for_cpus, _ in everywhere):  # it would read values before they are there, and then hang
        return UserError(
            "Horovod was built for CPUs, but the model is on a GPU",
            f"{horovod_setup.BUILD} --gpu --force, or set reduce.kind: mpi",
        )
    gpus = [gpu for _, gpu in everywhere if gpu]
    if len(set(gpus)) < len(gpus):
        return UserError("ranks share a GPU, which NCCL refuses", "start one rank a GPU, or set reduce.kind: mpi")
    return None


def open_horovod_allreduce(
    group: Group, layout: Layout, dtype: torch.dtype, device: torch.device, half: bool
) -> HorovodAllreduce:
    """Starts Horovod; raises UserError if it is missing or does not match."""
    horovod = horovod_setup.load("torch")
    if error := unfit(horovod, group, device):
        raise error
    lease = horovod_setup.start(horovod, group, on_gpu=device.type != "cpu")
    return HorovodAllreduce(lease, layout, dtype, device, half)
