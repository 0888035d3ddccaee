"""Which device a rank computes on, in which precision, how batches and copies get there and back, and how
long phases of a step took on its stream."""

from __future__ import annotations

import os
import weakref
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from time import monotonic
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hpctrain.comm.world import World
from hpctrain.config.sections import TrainConfig
from hpctrain.data.dataset import Samples
from hpctrain.errors import UserError
from hpctrain.monitor.rank.clock import RingClock
from hpctrain.monitor.shared import MARKED_AT, MARKED_PHASE, NO_PHASE
from hpctrain.monitor.window import ENDED, REST, WORK
from hpctrain.train.clock import Phase
from hpctrain.train.framework import HostBatch

LOW_PRECISION = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""By ``train.precision``: the type of forward passes; those that are not here are in the type of the parameters."""


@dataclass(frozen=True)
class Compute:
    """Where and how a rank computes."""

    device: torch.device
    low_precision: torch.dtype | None = None
    """Of forward passes, if it is not that of the parameters."""
    memory_format: torch.memory_format = torch.preserve_format
    """Of the model and of batches of images."""

    def autocast(self, **options: bool) -> AbstractContextManager[Any]:
        """Of forward passes."""
        if self.low_precision is None:  # they are in the type of the parameters
            return nullcontext()
        return torch.autocast(self.device.type, self.low_precision, **options)

    def tensors(self, batch: HostBatch) -> dict[str, torch.Tensor]:
        """A batch on the device."""
        if self.device.type == "cpu" and self.memory_format is torch.preserve_format:
            return {name: writable(array) for name, array in batch.items()}
        return {name: self._tensor(array) for name, array in batch.items()}

    def _tensor(self, array: NDArray[Any]) -> torch.Tensor:
        host = writable(array)
        if self.device.type == "cuda":
            host = host.pin_memory().to(self.device, non_blocking=True)
        return host.to(memory_format=self.memory_format) if host.ndim == 4 else host

    def place(self, samples: Samples) -> Samples:
        """Samples in memory from which they reach the device fastest: the copy to a GPU may last until the update is
        done, and a batch is kept until then."""
        if self.device.type != "cuda":
            return samples
        torch.cuda.set_device(self.device)  # of this thread, which would else open a context on the first GPU
        return {name: writable(array).pin_memory().numpy() for name, array in samples.items()}

    def staging(self, num_bytes: int, given: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
        """Host memory of zeros, page-locked if the model is on a GPU. Raises MemoryError if there is not so much."""
        try:
            memory = torch.zeros(num_bytes, dtype=torch.uint8) if given is None else torch.from_numpy(given)
            buffer = memory.numpy()
            if self.device.type == "cuda":  # torch's own page-locked memory is rounded up to a power of two, and kept
                pin(memory)
                weakref.finalize(buffer, unpin, memory.data_ptr()).atexit = False
            return buffer
        except RuntimeError as error:  # as torch calls it
            raise MemoryError(f"no host memory for a snapshot of {num_bytes} bytes") from error

    def synchronize(self) -> None:
        """Returns when all copies from the device are done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def compute_of(train: TrainConfig, device: torch.device) -> Compute:
    """As the run file says."""
    images = torch.channels_last if train.channels_last else torch.preserve_format
    return Compute(device, LOW_PRECISION.get(train.precision), images)


def writable(array: NDArray[Any]) -> torch.Tensor:
    """A host array as a tensor: over the same memory if a task may change it in place, else over a copy."""
    return torch.from_numpy(array if array.flags.carray else np.array(array))


def pin(staging: torch.Tensor) -> None:
    """Page-locks memory that torch did not allocate, so that copies run at full speed and asynchronously."""
    size = staging.numel() * staging.element_size()
    code = torch.cuda.cudart().cudaHostRegister(staging.data_ptr(), size, 0)
    torch.cuda.check_error(int(code))


def unpin(address: int) -> None:
    """Undoes ``pin`` of the memory that begins there."""
    torch.cuda.cudart().cudaHostUnregister(address)


def begin_task(seed: int, local_rank: int) -> None:
    """Seeds torch's generators; what the task makes on "cuda" is to lie on this rank's GPU."""
    pick_device(local_rank)
    torch.manual_seed(seed)


def pick_device(local_rank: int) -> torch.device:
    """One GPU a rank, in turn, made the current one of this thread; the CPU if there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def gpu_for_nccl(device: torch.device) -> str:
    """What NCCL tells ranks apart by: the GPU, and the host, which NCCL_HOSTID names if it is set."""
    return f"{os.environ.get('NCCL_HOSTID', '')} {torch.cuda.get_device_properties(device).uuid}".strip()


def require_same_kind(device: torch.device, world: World) -> None:
    """Raises UserError, on every rank, if some ranks have a GPU and others none. Collective."""
    everywhere = world.everyone.allgather([device.type, world.host], "compare devices")
    if len({kind for kind, _ in everywhere}) > 1:
        blind = next(rank for rank, (kind, _) in enumerate(everywhere) if kind == "cpu")
        raise UserError(
            f"rank {blind} on {everywhere[blind][1]} sees no GPU, though other ranks do",
            "run hpctrain doctor there (driver, CUDA_VISIBLE_DEVICES, a PyTorch for CPUs), or leave the host out",
        )


LONGEST_QUEUE = 4096
"""Marks that may await the device. A device further behind than that has its oldest marks dropped."""


class CudaMarks:
    """Takes the marks of a clock and enters them when the device has reached them: polled later, never waited for.

    The host only queues work, so its own time stamps say little. An event recorded where a phase ends fires when the
    device has come so far; a device that idles because the host reads data or collects garbage shows that as the
    phase's length.

    Args:
        clock: whose totals and ring are written.
    """

    def __init__(self, clock: RingClock) -> None:
        self.clock = clock
        self.free: list[torch.cuda.Event] = []
        self.waiting: deque[tuple[int, torch.cuda.Event, float, float]] = deque()
        """Phase, its end, the step's work if the step ends with it (else -1), and seconds of it that were waited."""
        self.waited_s = 0.0
        self.last = self.record()

    def record(self) -> torch.cuda.Event:
        """An event at this point of the current stream; events are used again."""
        event = self.free.pop() if self.free else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def mark(self, phase: int) -> None:
        self.append(phase, -1.0)
        head = self.clock.head
        head[MARKED_AT] = monotonic()
        head[MARKED_PHASE] = phase

    def end_step(self, work: float = 1.0) -> None:
        """Enters what the device has finished; a step's row may come some steps late."""
        clock = self.clock
        self.append(REST, work)
        clock.head[MARKED_AT] = monotonic()
        clock.head[MARKED_PHASE] = NO_PHASE
        self.enter()

    def end_wait(self) -> None:
        """The device had nothing to do: what it was to send had been copied to the host before."""
        self.waited_s += self.clock.waited()

    def append(self, phase: int, work: float) -> None:
        """Enters a mark into the queue."""
        self.waiting.append((phase, self.record(), work, self.waited_s))
        self.waited_s = 0.0

    def enter(self) -> None:
        """Adds finished phases to the totals, and finished steps to the ring."""
        waiting, totals = self.waiting, self.clock.totals
        while waiting and (waiting[0][1].query() or len(waiting) > LONGEST_QUEUE):
            phase, event, work, waited = waiting.popleft()
            if event.query():
                seconds = self.last.elapsed_time(event) / 1000
                waited = min(waited, seconds)  # a stage may wait on the host while its device still works
                totals[phase] += seconds - waited
                totals[Phase.EXCHANGE] += waited
            self.free.append(self.last)
            self.last = event
            if work >= 0:
                totals[WORK] += work
                totals[ENDED] = monotonic()
                self.clock.publish()


def follow_cuda(clock: RingClock) -> None:
    """From now on the clock's marks are those of the current CUDA stream."""
    clock.follow(CudaMarks(clock))
