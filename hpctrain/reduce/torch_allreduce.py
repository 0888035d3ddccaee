"""Sums of a flat torch tensor over ranks, by MPI on the host."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpctrain.comm.group import Group
from hpctrain.reduce.candidates import Candidate
from hpctrain.reduce.host_allreduce import open_host_allreduce
from hpctrain.reduce.layout import Layout
from hpctrain.reduce.mpi_allreduce import HostAllreduce


class TensorAllreduce(Protocol):
    """Sums ``flat`` over the ranks, in place. Every rank makes the same calls in the same order."""

    flat: Tensor
    """This rank's values before, the sums after ``finish``; one-dimensional."""

    def start(self, begin: int, end: int) -> None:
        """These elements are complete and may travel."""

    def finish(self) -> None:
        """Returns when the whole tensor holds the sums."""

    def close(self) -> None:
        """Ends threads, frees communicators."""


class HostTensorAllreduce:
    """A host sum for tensors on the CPU: they are the same memory."""

    def __init__(self, host: HostAllreduce) -> None:
        self.host = host
        self.flat = torch.from_numpy(host.buffer)
        self.start = host.start
        self.finish = host.finish
        self.close = host.close


class StagedTensorAllreduce:
    """A host sum for tensors on a GPU: through page-locked memory, each part as soon as it is ready."""

    def __init__(self, host: HostAllreduce, device: torch.device) -> None:
        self.host = host
        self.staging = torch.from_numpy(host.buffer)
        pin(self.staging)
        self.flat = torch.zeros(len(host.buffer), dtype=self.staging.dtype, device=device)
        self.stream = torch.cuda.Stream(device)
        self.copies: list[tuple[int, int, torch.cuda.Event]] = []

    def start(self, begin: int, end: int) -> None:
        self.stream.wait_stream(torch.cuda.current_stream(self.flat.device))
        with torch.cuda.stream(self.stream):
            self.staging[begin:end].copy_(self.flat[begin:end], non_blocking=True)
            done = torch.cuda.Event()
            done.record()
        self.copies.append((begin, end, done))

    def finish(self) -> None:
        for begin, end, done in self.copies:  # the first travel while the last are being copied
            done.synchronize()
            self.host.start(begin, end)
        self.copies.clear()
        self.host.finish()
        self.flat.copy_(self.staging, non_blocking=True)

    def close(self) -> None:
        torch.cuda.synchronize(self.flat.device)
        unpin(self.staging.data_ptr())
        self.host.close()


def pin(staging: Tensor) -> None:
    """Page-locks memory that torch did not allocate, so that copies run at full speed and asynchronously."""
    size = staging.numel() * staging.element_size()
    code = torch.cuda.cudart().cudaHostRegister(staging.data_ptr(), size, 0)
    torch.cuda.check_error(int(code))


def unpin(address: int) -> None:
    """Undoes ``pin`` of the memory that begins there."""
    torch.cuda.cudart().cudaHostUnregister(address)


class TorchCodec:
    """16-bit forms by torch's vectorised conversions."""

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
    """The sum that a candidate of kind mpi names; if shared memory is impossible, one flat message in its place."""
    candidate, host = open_host_allreduce(
        candidate, group, layout.length, torch.empty(0, dtype=dtype).numpy().dtype, CODECS
    )
    return candidate, HostTensorAllreduce(host) if device.type == "cpu" else StagedTensorAllreduce(host, device)
