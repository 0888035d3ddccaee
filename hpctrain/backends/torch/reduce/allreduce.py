"""Sums of a flat torch tensor over ranks, by MPI through host memory."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from hpctrain.backends.torch import accelerator
from hpctrain.backends.torch.process_groups import is_left_open
from hpctrain.comm.group import Group
from hpctrain.reduce.candidates import Candidate
from hpctrain.reduce.flat_layout import Layout
from hpctrain.reduce.host_allreduce import open_host_allreduce
from hpctrain.reduce.mpi_allreduce import HostAllreduce
from hpctrain.reduce.streamed_allreduce import StreamedAllreduce

HOST_S_PER_BYTE = 2 / 40e9 + 2 / 15e9
"""Estimate for gradients of a GPU: copied to the host and back at 40 GB/s, added at 15 GB/s by one core per rank."""


class TensorAllreduce(Protocol):
    """Sums ``flat`` over the ranks, in place. Every rank makes the same calls in the same order."""

    flat: torch.Tensor
    """One-dimensional: this rank's values, replaced by the sums in ``finish``."""

    def start(self, begin: int, end: int) -> None:
        """These elements are complete and may be sent."""

    def finish(self) -> None:
        """Returns when the whole tensor holds sums."""

    def close(self) -> object:
        """Ends threads and frees communicators."""


class HostTensorAllreduce:
    """A host sum for tensors on the CPU, which share memory with its buffer."""

    def __init__(self, host: HostAllreduce) -> None:
        self.host = host
        self.flat = torch.from_numpy(host.buffer)
        self.start = host.start
        self.finish = host.finish
        self.close = host.close
        self.arrive = host.arrive if isinstance(host, StreamedAllreduce) else None
        """StreamedAllreduce.arrive; None if all sums arrive at once."""


class StagedTensorAllreduce:
    """A host sum for tensors on a GPU: copied through page-locked memory, each part as soon as it is ready."""

    def __init__(self, host: HostAllreduce, device: torch.device) -> None:
        self.host = host
        self.staging = torch.from_numpy(host.buffer)
        accelerator.pin(self.staging, device)
        self.flat = torch.zeros(len(host.buffer), dtype=self.staging.dtype, device=device)
        self.stream = accelerator.SideStream(device)
        self.copies: list[tuple[int, int, Any]] = []

    def start(self, begin: int, end: int) -> None:
        with self.stream.after_current():
            self.staging[begin:end].copy_(self.flat[begin:end], non_blocking=True)
            done = accelerator.event(self.flat.device)
            done.record()
        self.copies.append((begin, end, done))

    def finish(self) -> None:
        for begin, end, done in self.copies:  # the first parts are sent while the last are being copied
            done.synchronize()
            self.host.start(begin, end)
        self.copies.clear()
        self.host.finish()
        self.flat.copy_(self.staging, non_blocking=True)

    def close(self) -> None:
        if not is_left_open(self.flat.device):
            accelerator.synchronize(self.flat.device)
            accelerator.unpin(self.staging.data_ptr(), self.flat.device)
        self.host.close()


class TorchCodec:
    """Converts to 16 bits and back with torch's vectorised kernels."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def encode(self, values: NDArray[np.float32], out: NDArray[np.uint16]) -> None:
        torch.from_numpy(out.view(np.int16)).view(self.dtype).copy_(torch.from_numpy(values))

    def decode(self, packed: NDArray[np.uint16], out: NDArray[np.float32]) -> None:
        torch.from_numpy(out).copy_(torch.from_numpy(packed.view(np.int16)).view(self.dtype))


CODECS = {"fp16": TorchCodec(torch.float16), "bf16": TorchCodec(torch.bfloat16)}


def open_tensor_allreduce(
    candidate: Candidate, group: Group, layout: Layout, dtype: torch.dtype, device: torch.device
) -> tuple[Candidate, TensorAllreduce]:
    """Opens an MPI candidate's sum; returns it with the candidate used: flat if shared memory is impossible."""
    buffer_dtype = torch.empty(0, dtype=dtype, device="cpu").numpy().dtype
    candidate, host = open_host_allreduce(candidate, group, layout.length, buffer_dtype, CODECS)
    return candidate, HostTensorAllreduce(host) if device.type == "cpu" else StagedTensorAllreduce(host, device)
