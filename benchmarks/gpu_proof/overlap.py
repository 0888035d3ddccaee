"""Data parallelism by NCCL (on a CPU by gloo): how often the host waits for the device, whether buckets leave during
backward, and memory and step time compared with DistributedDataParallel and a bare loop.

Ranks share the GPU, so times show overhead and not the speed of links.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_proof import tasks
from benchmarks.gpu_proof.machine import device_of, finish
from benchmarks.gpu_proof.rows import Figures, Setting, require
from benchmarks.gpu_proof.runs import run_file, trained
from benchmarks.gpu_proof.speed import Clocked
from hpctrain import BaseHook, connect
from hpctrain.backends.torch.process_groups import ProcessGroup, peers_of

WARM, STEPS = 4, 20
UPDATES = 2
"""Updates whose messages are noted; the first of them is profiled."""
BATCH = 8
SYNC = "called a synchronizing"
"""Part of torch's warning."""


def sizes(on_gpu: bool) -> dict[str, Any]:
    """Arguments of the task: 170 million parameters on a GPU."""
    return {"width": 1024, "blocks": 12, "heads": 16, "length": 256} if on_gpu else {"width": 64}


def run(
    folder: Path, setting: Setting, steps: int, hooks: list[BaseHook], sync: dict[str, Any] | None = None, **train: Any
) -> None:
    """Trains by ``reduce.kind: nccl``; losses are reported only at the end."""
    sections = {
        "sync": sync or {},
        "reduce": {"kind": "nccl", **({} if setting.on_gpu else {"bucket_bytes": 65536})},
        "checkpoint": {"enabled": False},
        "track": {"every_steps": 10 * steps},
    }
    trained(run_file(folder, "gpt", sizes(setting.on_gpu), steps, BATCH, train=train, **sections), hooks)


class CountsWaits(BaseHook):
    """Counts synchronising calls of CUDA between two steps."""

    def __init__(self, on_gpu: bool) -> None:
        self.on_gpu, self.count = on_gpu, 0
        self.watched: AbstractContextManager[Any] = nullcontext()
        self.said: list[warnings.WarningMessage] = []

    def after_step(self, training: Any, result: Any) -> None:
        """Begins after the warm-up, and ends ``STEPS`` updates later."""
        if training.state.step == WARM and self.on_gpu:
            caught = warnings.catch_warnings(record=True)
            self.watched, self.said = caught, caught.__enter__() or []
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
        if training.state.step == WARM + STEPS and self.on_gpu:
            torch.cuda.set_sync_debug_mode("default")
            self.count = sum(SYNC in str(one.message) for one in self.said)
            self.watched.__exit__(None, None, None)


def waits(setting: Setting) -> Figures:
    """At most one wait for the device per update, also with clipping and in local SGD, whose weights would otherwise
    pass through the host; waits for an event are not counted."""
    found = {}
    apart = {"kind": "local", "every_steps": 4, "overlap": True}
    variants: dict[str, dict[str, Any]] = {"plain": {}, "clipped": {"clip_norm": 1.0}, "apart": {"sync": apart}}
    for name, train in variants.items():
        counts = CountsWaits(setting.on_gpu)
        run(setting.folder / name, setting, WARM + STEPS + 1, [counts], **train)
        found[name] = counts.count / STEPS
        require(found[name] <= 1, f"the host waits for the device {found[name]:g} times per update ({name})")
    return found


class Profiles(BaseHook):
    """Profiles one step."""

    def __init__(self, on_gpu: bool) -> None:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        self.profile = profile(activities=activities)

    def after_step(self, training: Any, result: Any) -> None:
        """Profiles the step after the warm-up."""
        if training.state.step == WARM:
            self.profile.__enter__()
        if training.state.step == WARM + 1:
            self.profile.__exit__(None, None, None)


PRODUCTS = ("gemm", "cutlass", "nvjet")
"""Parts of the names of kernels that multiply matrices; cuBLAS calls Hopper's nvjet."""


def overlap(setting: Setting) -> Figures:
    """The first message is under way before the last kernel of backward has run, also if layers are compiled."""
    compiled = overlap_of(setting, "compiled", compile=True) if setting.on_gpu else {}
    return {**overlap_of(setting, "eager"), **{f"compiled_{name}": value for name, value in compiled.items()}}


def overlap_of(setting: Setting, name: str, **train: Any) -> Figures:
    """The figures of one run."""
    profiles = Profiles(setting.on_gpu)
    sent: list[float] = []
    run(setting.folder / name, setting, WARM + UPDATES, [Noting(sent), profiles], **train)
    require(len(sent) > UPDATES, "everything was sent in one message")
    if not setting.on_gpu:
        return {"messages": len(sent) // UPDATES}
    events = [one for one in profiles.profile.events() if one.device_type == torch.autograd.DeviceType.CUDA]
    messages = [one.time_range.start for one in events if "nccl" in one.name.lower()]
    others = [one for one in events if "nccl" not in one.name.lower()]
    products = [one.time_range.end for one in others if any(part in one.name.lower() for part in PRODUCTS)]
    require(bool(messages and products), "the profile shows no messages, or no matrix products")
    ahead_us = max(products) - min(messages)
    require(ahead_us > 0, "no message began before the last matrix product of backward")
    return {"messages": len(messages), "first_ahead_of_last_product_ms": ahead_us / 1000}


class Noting(BaseHook):
    """Notes the messages of each update after the warm-up."""

    def __init__(self, sent: list[float]) -> None:
        self.sent = sent

    def after_step(self, training: Any, result: Any) -> None:
        """Replaces the sum of the process group by one that notes its calls."""
        if training.state.step == WARM:
            plain: Callable[..., Any] = ProcessGroup.sum

            def noted(peers: ProcessGroup, values: torch.Tensor, what: str) -> Any:
                self.sent.append(time.perf_counter())
                return plain(peers, values, what)

            ProcessGroup.sum = noted  # type: ignore[method-assign, assignment]


def speed(setting: Setting) -> Figures:
    """Peak memory and step time of hpctrain, DDP with bucket views, and a bare loop that exchanges nothing."""
    found: Figures = {}
    for contender in ("hpctrain", "ddp", "bare"):
        if setting.on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        clocked = Clocked(WARM, WARM + STEPS, setting.on_gpu)
        if contender == "hpctrain":
            run(setting.folder / "run", setting, WARM + STEPS, [clocked])
        else:
            theirs(setting, clocked, contender == "ddp")
        found[f"{contender}_ms"] = 1000 * clocked.step_s
        if setting.on_gpu:
            found[f"{contender}_peak_GB"] = torch.cuda.max_memory_allocated() / 1e9
    return {
        **found,
        "to_ddp": found["hpctrain_ms"] / found["ddp_ms"],
        "to_bare": found["hpctrain_ms"] / found["bare_ms"],
    }


def theirs(setting: Setting, clocked: Clocked, ddp: bool) -> None:
    """A torch loop on this rank's part of each batch."""
    world, device = connect(), device_of(setting.on_gpu)
    task = tasks.gpt(**sizes(setting.on_gpu))
    task.model.to(device)
    call: Any = task.model
    given = tasks.batches(task, BATCH // world.size, WARM + STEPS, device)
    if not ddp:
        tasks.bare_loop(task, given, None, call, clocked.mark)
        return
    peers = peers_of(world.everyone, device)
    group = dist.ProcessGroup(world.rank, world.size)  # type: ignore[call-arg]
    backend = dist.ProcessGroup.BackendType.NCCL if setting.on_gpu else dist.ProcessGroup.BackendType.GLOO
    group._register_backend(device, backend, peers.ranks)
    group._set_default_backend(backend)
    call = DistributedDataParallel(task.model, process_group=group, gradient_as_bucket_view=True)
    tasks.bare_loop(task, given, None, call, clocked.mark)
    finish(setting.on_gpu)
    peers.close()
