"""A rank's device and precision, transfers to and from it, and phase times on its stream."""

from __future__ import annotations

import dataclasses
import itertools
import os
import socket
import weakref
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hpctrain.backends.torch import accelerator
from hpctrain.backends.torch.ahead import BatchCopy, CopiesAhead, Placed
from hpctrain.comm.world import World
from hpctrain.config.sections import TrainConfig
from hpctrain.data.dataset import Samples
from hpctrain.errors import UserError
from hpctrain.monitor.ring_clock import RingClock
from hpctrain.monitor.shared import NO_PHASE
from hpctrain.monitor.window import REST
from hpctrain.system.array_types import Array, Bytes
from hpctrain.system.fabric import cores_near, keep_to, own_cores
from hpctrain.train.clock import Neighbours
from hpctrain.train.framework import HostBatch, HostMemory

LOW_PRECISION = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Dtype of forward passes by ``train.precision``; others compute in the dtype of the parameters."""


@dataclass(frozen=True)
class Compute(HostMemory):
    """Where and how a rank computes."""

    device: torch.device
    low_precision: torch.dtype | None = None
    """Dtype of forward passes; None for that of the parameters."""
    memory_format: torch.memory_format = torch.preserve_format
    """Memory format of the model and of 4-dimensional arrays of a batch."""
    ahead: CopiesAhead | None = None
    """Copies batches ahead of their use; None for the CPU."""
    allocates: bool = True
    """Whether parameters on the meta device get memory; not if a process only builds what a rank would have."""

    def autocast(self, **options: bool) -> AbstractContextManager[Any]:
        """Context of forward passes."""
        if self.low_precision is None:
            return nullcontext()
        return torch.autocast(self.device.type, self.low_precision, **options)

    def tensors(self, batch: HostBatch) -> dict[str, torch.Tensor]:
        """Copies a batch to the device."""
        if isinstance(batch, Placed) and self.ahead and (copy := self.ahead.take(batch)):
            accelerator.hand_over(self.device, copy.tensors.values(), copy.done)
            return copy.tensors
        if self.device.type == "cpu" and self.memory_format is torch.preserve_format:
            return {name: writable(array) for name, array in batch.items()}
        return self.sent(batch)

    def sent(self, batch: HostBatch) -> dict[str, torch.Tensor]:
        """Begins to copy a batch to the device on the current stream."""
        return {name: self._tensor(array) for name, array in batch.items()}

    def _tensor(self, array: Array) -> torch.Tensor:
        host = writable(array)
        if self.device.type != "cpu":
            host = host.pin_memory().to(self.device, non_blocking=True)
        return host.to(memory_format=self.memory_format) if host.ndim == 4 else host

    def place(self, samples: Samples) -> Samples:
        """Places samples in the memory with the fastest transfer to the device: page-locked memory for a GPU.

        The copy is asynchronous; batches are kept until the update is done.
        """
        if self.ahead is None:
            return samples
        accelerator.select(self.device)
        return self.ahead.add(Placed((name, writable(array).pin_memory().numpy()) for name, array in samples.items()))

    def staging(self, num_bytes: int, given: Bytes | None = None) -> Bytes:
        """Allocates zeroed host memory, page-locked if the model is on a GPU. Raises MemoryError if it fails."""
        try:
            memory = (
                torch.zeros(num_bytes, dtype=torch.uint8, device="cpu") if given is None else torch.from_numpy(given)
            )
            buffer = memory.numpy()
            if self.device.type != "cpu":  # torch would round page-locked memory up to a power of two and cache it
                accelerator.pin(memory, self.device)
                weakref.finalize(buffer, accelerator.unpin, memory.data_ptr(), self.device).atexit = False
            return buffer
        except RuntimeError as error:  # torch's error for this
            raise MemoryError(f"no host memory for a snapshot of {num_bytes} bytes") from error

    def synchronize(self) -> None:
        """Waits for all copies from the device."""
        accelerator.synchronize(self.device)


def compute_of(train: TrainConfig, device: torch.device) -> Compute:
    """Makes the settings from the run file's train section."""
    images = torch.channels_last if train.channels_last else torch.preserve_format
    plain = Compute(device, LOW_PRECISION.get(train.precision), images)
    return plain if device.type == "cpu" else dataclasses.replace(plain, ahead=CopiesAhead(BatchSender(plain)))


class BatchSender:
    """Begins copies of batches on a side stream."""

    def __init__(self, compute: Compute) -> None:
        self.compute, self.stream = compute, accelerator.SideStream(compute.device)

    def __call__(self, batch: HostBatch) -> BatchCopy:
        with self.stream.here():
            tensors = self.compute.sent(batch)
            done = accelerator.event(self.compute.device)
            done.record()
        return BatchCopy(tensors, done)


def writable(array: Array) -> torch.Tensor:
    """Host array as a tensor: over the same memory if it is writable and contiguous, otherwise over a copy."""
    return torch.from_numpy(array if array.flags.carray else np.array(array))


def begin_task(seed: int, local_rank: int) -> None:
    """Seeds torch's generators and makes this rank's device the default before a task is made."""
    accelerator.pick(local_rank)
    torch.manual_seed(seed)


def gpu_for_nccl(device: torch.device) -> str:
    """Identity by which NCCL distinguishes ranks: the GPU's, and the host's, which is NCCL_HOSTID if set."""
    return f"{os.environ.get('NCCL_HOSTID') or socket.gethostname()} {accelerator.identity(device)}"


def require_same_kind(device: torch.device, world: World) -> None:
    """Raises UserError on every rank if only some ranks have a GPU. Collective."""
    everywhere = world.everyone.allgather([device.type, world.host], "compare devices")
    if len({kind for kind, _ in everywhere}) > 1:
        blind = next(rank for rank, (kind, _) in enumerate(everywhere) if kind == "cpu")
        raise UserError(
            f"rank {blind} on {everywhere[blind][1]} sees no GPU, though other ranks do",
            "run hpctrain doctor there (driver, CUDA_VISIBLE_DEVICES, a PyTorch for CPUs), or leave the host out",
        )


def stay_near(device: torch.device, world: World) -> None:
    """Binds this process to the cores next to its GPU; see ``own_cores``. Collective."""
    near = set() if device.type == "cpu" else cores_near(accelerator.pci_address(device))
    mine = [sorted(os.sched_getaffinity(0)), sorted(near)]
    if cores := own_cores(world.local_rank, world.local.allgather(mine, "share the cores")):
        keep_to(cores)


MEMORY_STEPS = 16
"""Steps between looks at the memory in use."""
LONGEST_QUEUE = 4096
"""Longest queue of pending marks; if the device falls further behind, the oldest are dropped."""


class DeviceMarks:
    """Records a clock's marks as events of the device and adds them to its totals once the device has reached them.

    The host only queues work, so its own timestamps are not the times of phases. The event at the end of a phase fires
    when the device reaches it; idle time of the device while the host reads data or collects garbage counts in that
    phase. Events are polled and never waited for.

    Args:
        clock: the clock whose totals and ring are written.
        device: the rank's GPU.
    """

    def __init__(self, clock: RingClock, device: torch.device) -> None:
        self.clock, self.device = clock, device
        self.free: list[Any] = []
        self.waiting: deque[tuple[int, Any, float, list[tuple[Any, Any]]]] = deque()
        """Phase, event at its end, the step's work if the step ends there (else -1), and its waits."""
        self.waits: list[tuple[Any, Any]] = []
        """Events at the beginning and end of each wait for other ranks in the current phase."""
        self.ahead: int | None = None
        """Phase whose end is queued, and which the host has yet to mark."""
        self.last = self.record()
        self.wait_began: Any = None
        clock.on_gpu(accelerator.pci_address(device))

    def record(self) -> Any:
        """Records an event on the current stream; events are reused."""
        event = self.free.pop() if self.free else accelerator.event(self.device, timed=True)
        event.record()
        return event

    def mark(self, phase: int) -> None:
        if phase != self.ahead:
            self.append(phase, -1.0)
        self.ahead = None
        self.clock.beat(phase)

    def mark_ahead(self, phase: int) -> None:
        """See StepClock. The agent still sees a rank that waits in this phase."""
        self.append(phase, -1.0)
        self.ahead = phase

    def end_step(self, work: float = 1.0) -> None:
        """See Marks. Publishes what the device has finished; a step's row may come some steps late."""
        self.append(REST, work)
        self.clock.beat(NO_PHASE)
        self.enter()

    def begin_wait(self, whom: Neighbours) -> None:
        """See Marks. The stream may wait by itself, while the host continues, or be idle while the host waits."""
        self.clock.waits_for(whom)
        self.wait_began = self.record()

    def end_wait(self) -> None:
        """See Marks."""
        self.clock.waited()
        self.waits.append((self.wait_began, self.record()))

    def append(self, phase: int, work: float) -> None:
        """Queues a mark."""
        self.waiting.append((phase, self.record(), work, self.waits))
        self.waits = []

    def enter(self) -> None:
        """Adds finished phases to the totals and finished steps to the ring."""
        waiting = self.waiting
        while waiting and (waiting[0][1].query() or len(waiting) > LONGEST_QUEUE):
            phase, event, work, waits = waiting.popleft()
            if event.query():
                waited = sum(began.elapsed_time(ended) for began, ended in waits)
                self.clock.add(phase, self.last.elapsed_time(event) / 1000, waited / 1000)
            self.free += [self.last, *itertools.chain.from_iterable(waits)]
            self.last = event
            if work >= 0:
                self.clock.end_row(work)
                if self.clock.published % MEMORY_STEPS == 1:
                    self.clock.device_memory(*accelerator.memory(self.device))


def follow_device(clock: RingClock, device: torch.device) -> None:
    """Makes the clock measure phases on the current stream of a GPU."""
    clock.follow(DeviceMarks(clock, device))
