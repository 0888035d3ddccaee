"""Step times in bf16 with torch.compile of hpctrain, DistributedDataParallel and a bare loop, and device utilisation.

All use the same weights and samples. The bare loops have their batches on the device already; hpctrain transfers each
one from the data set.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.gpu_proof import tasks
from benchmarks.gpu_proof.machine import device_of, finish, peak_per_s
from benchmarks.gpu_proof.rows import Figures, Setting, require
from benchmarks.gpu_proof.runs import furthest, run_file, trained
from hpctrain import BaseHook, TorchTask

WARM = 8
"""Steps before timing starts. The mean of their losses is compared: later losses diverge by rounding."""
COMPILE = "HPCTRAIN_PROOF_COMPILE"
"""Environment variable: compile on a CPU too."""
LARGEST = 0.05
"""Largest relative difference of losses in bf16."""


def gpt(setting: Setting) -> Figures:
    """Measures a GPT, on a GPU with 170 million parameters."""
    sizes = {"width": 1024, "blocks": 12, "heads": 16, "length": 1024} if setting.on_gpu else {"length": 32}
    return measured(setting, "gpt", tasks.gpt, sizes, 8)


def resnet(setting: Setting) -> Figures:
    """Measures a ResNet, on a GPU ResNet-50."""
    sizes = {} if setting.on_gpu else {"blocks": "1,1", "width": 8, "size": 32, "samples": 64}
    return measured(setting, "resnet", tasks.resnet, sizes, 128 if setting.on_gpu else 8)


class Clocked(BaseHook):
    """Times the steps after the warm-up: waits for the device at both ends, but not in between."""

    def __init__(self, first: int, last: int, on_gpu: bool) -> None:
        self.first, self.last, self.on_gpu = first, last, on_gpu
        self.at: list[float] = []

    def mark(self, step: int) -> None:
        """Records the time at the two ends."""
        if step in (self.first, self.last):
            finish(self.on_gpu)
            self.at.append(time.perf_counter())

    def after_step(self, training: Any, result: Any) -> None:
        """Calls ``mark`` in hpctrain's loop."""
        self.mark(training.state.step)

    @property
    def step_s(self) -> float:
        """Mean seconds of the steps in between."""
        return (self.at[1] - self.at[0]) / (self.last - self.first)


def measured(setting: Setting, name: str, make: Callable[..., TorchTask], sizes: Any, batch: int) -> Figures:
    """Runs the three loops alternately, twice unless they are compiled."""
    compiles = can_compile(setting.on_gpu) and not setting.row.name.endswith("-eager")
    steps = WARM + (20 if setting.on_gpu else 8)
    seconds: dict[str, list[float]] = {"hpctrain": [], "ddp": [], "bare": []}
    losses: dict[str, list[float]] = {}
    for turn in range(1 if compiles else 2):
        for contender, taken in seconds.items():
            clocked = Clocked(WARM, steps, setting.on_gpu)
            if contender == "hpctrain":
                folder = setting.folder / f"run-{turn}"
                losses[contender] = ours(folder, name, sizes, batch, steps, compiles, clocked)
            else:
                losses[contender] = theirs(setting, make(**sizes), batch, steps, compiles, clocked, contender == "ddp")
            taken.append(clocked.step_s)
    for contender in ("hpctrain", "ddp"):
        difference = furthest(losses[contender][:1], losses["bare"][:1])
        require(difference <= LARGEST, f"losses of {contender} differ by {difference:.2g} from those of the bare loop")
    operations, (peak, source) = operations_of(make(**sizes), batch, setting.on_gpu), peak_per_s(setting.on_gpu)
    best = {contender: min(taken) for contender, taken in seconds.items()}
    return {
        "compiled": compiles,
        **{f"{contender}_ms": 1000 * taken for contender, taken in best.items()},
        "to_ddp": best["hpctrain"] / best["ddp"],
        "to_bare": best["hpctrain"] / best["bare"],
        **{f"mfu_{contender}": operations / taken / peak for contender, taken in best.items()},
        "peak_from": source,
        "last_loss": losses["hpctrain"][-1],
    }


def can_compile(on_gpu: bool) -> bool:
    """Whether torch.compile can be used. On CPUs it takes minutes, so it must be requested."""
    if not on_gpu and not os.environ.get(COMPILE):
        return False
    return bool(shutil.which("g++") or shutil.which("gcc")) and (not on_gpu or bool(importlib.util.find_spec("triton")))


def ours(folder: Path, name: str, sizes: Any, batch: int, steps: int, compiles: bool, clocked: Clocked) -> list[float]:
    """Runs hpctrain; returns the mean losses of its intervals, of which the first is the warm-up."""
    sections = {"train": {"precision": "bf16", "compile": compiles}, "track": {"every_steps": WARM}}
    config = run_file(folder, name, sizes, steps, batch, checkpoint={"enabled": False}, **sections)
    return list(trained(config, [clocked]).of_step.values())


def theirs(
    setting: Setting, task: TorchTask, batch: int, steps: int, compiles: bool, clocked: Clocked, ddp: bool
) -> list[float]:
    """Runs a torch loop, optionally with DistributedDataParallel; returns the mean warm-up loss and the last loss."""
    device = device_of(setting.on_gpu)
    task.model.to(device)
    call: Any = task.model
    if ddp:
        if not dist.is_initialized():
            dist.init_process_group("nccl" if setting.on_gpu else "gloo", store=dist.HashStore(), rank=0, world_size=1)
        call = DistributedDataParallel(task.model)
    call = torch.compile(call) if compiles else call
    given = tasks.batches(task, batch, steps, device)
    losses = tasks.bare_loop(task, given, torch.bfloat16, call, clocked.mark)
    return [statistics.fmean(losses[:WARM]), losses[-1]]


def operations_of(task: TorchTask, batch: int, on_gpu: bool) -> float:
    """Operations of a step: forward, and twice that for backward."""
    device = device_of(on_gpu)
    task.model.to(device)
    (given,) = tasks.batches(task, batch, 1, device)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        task.model(given["inputs"])
    return 3.0 * float(counter.get_total_flops())
