"""Transfer of samples to the device."""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks.gpu_proof.checkpoint import timed
from benchmarks.gpu_proof.machine import device_of, finish
from benchmarks.gpu_proof.rows import Figures, Setting, require
from benchmarks.gpu_proof.runs import run_file, trained
from hpctrain import BaseHook

STEPS, BATCH = 12, 4
READ_S = 0.03
"""Seconds to read a sample: long enough that the step itself is short in comparison, even on a busy machine."""


def pinned(setting: Setting) -> Figures:
    """Checks copies from pageable and pinned memory; without a GPU both are copies within host memory."""
    device = device_of(setting.on_gpu)
    pageable = torch.arange(2**25 if setting.on_gpu else 2**22, dtype=torch.float32)
    locked = pageable.pin_memory() if setting.on_gpu else pageable.clone()
    target = torch.empty_like(pageable, device=device)
    speeds = {}
    for name, source in (("pageable", pageable), ("pinned", locked)):
        target.zero_()
        seconds = timed(lambda source=source: target.copy_(source, non_blocking=True), setting.on_gpu)
        require(torch.equal(target.cpu(), pageable), f"a copy of {name} memory brought other bytes")
        speeds[f"{name}_GB_per_s"] = 4 * pageable.numel() / seconds / 1e9
    if setting.on_gpu:
        began = time.perf_counter()
        target.copy_(locked, non_blocking=True)
        queued = time.perf_counter() - began
        finish(True)
        whole = time.perf_counter() - began
        require(queued < 0.5 * whole, f"a copy of pinned memory held the host for {queued / whole:.0%} of its time")
        speeds["host_held_share"] = queued / whole
    return speeds


class Works(BaseHook):
    """Keeps the device busy for some time after each step, and records when steps ended."""

    def __init__(self, seconds: float, on_gpu: bool) -> None:
        self.seconds, self.on_gpu = seconds, on_gpu
        self.ends: list[float] = []

    def after_step(self, training: Any, result: Any) -> None:
        """Simulates a long step."""
        if self.on_gpu:
            torch.cuda._sleep(int(self.seconds * 1.5e9))
        else:
            time.sleep(self.seconds)
        finish(self.on_gpu)
        self.ends.append(time.perf_counter())


def prefetch(setting: Setting) -> Figures:
    """Reading takes as long as computing, so overlapping them should halve the step."""
    steps, losses = {}, {}
    for batches in (0, 2):
        works = Works(BATCH * READ_S, setting.on_gpu)
        config = run_file(
            setting.folder / f"{batches}", "gpt", {"wait_s": READ_S}, STEPS, BATCH, data={"prefetch_batches": batches}
        )
        losses[batches] = trained(config, [works]).of_step
        gaps = sorted(later - earlier for earlier, later in zip(works.ends[2:], works.ends[3:], strict=False))
        steps[batches] = gaps[len(gaps) // 4]  # other load only makes steps longer
    require(losses[0] == losses[2], "prefetch changed a loss")
    require(steps[2] < 0.85 * steps[0], f"a step takes {steps[2]:.3f} s with prefetch and {steps[0]:.3f} s without")
    return {"step_ms": 1000 * steps[2], "step_without_prefetch_ms": 1000 * steps[0]}
