"""Learning-rate schedules: pure functions from the step to a factor on the optimizer's own learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable

from hpctrain.config.sections import ScheduleConfig

Schedule = Callable[[int], float]
"""Factor for the update that follows ``step`` done ones."""


def make_schedule(
    config: ScheduleConfig, global_batch: int, ranks: int, total_steps: int, batches_per_epoch: int
) -> Schedule:
    """The schedule of a run.

    Args:
        config: the run file's section.
        global_batch: samples of one update over all ranks.
        ranks: data-parallel ranks; without ``base_batch`` the optimizer's rate is meant for one rank's batch.
        total_steps: updates of the whole run.
        batches_per_epoch: updates of one epoch.
    """
    peak = scale(config.scaling, global_batch / (config.base_batch or global_batch / ranks))
    warmup = config.warmup_steps or round((config.warmup_epochs or 0) * batches_per_epoch)
    shape = _shape(config, batches_per_epoch)
    span = max(total_steps - warmup, 1)

    def factor(step: int) -> float:
        if step < warmup:
            return warm_up(step, warmup, peak)
        return peak * shape(step, min((step - warmup) / span, 1.0))

    return factor


def scale(rule: str, growth: float) -> float:
    """Factor for a batch ``growth`` times as large: linear (Goyal et al. 2017, section 2.1) or square root."""
    return {"none": 1.0, "linear": growth, "sqrt": math.sqrt(growth)}[rule]


def warm_up(step: int, warmup_steps: int, peak: float) -> float:
    """Gradual warm-up (Goyal et al. 2017, section 2.2): from the unscaled rate to ``peak``, by equal steps.

    Where the rate is not scaled up there is nothing to climb from, so it starts at zero.
    """
    start = 1.0 if peak > 1 else 0.0
    return start + (peak - start) * (step + 1) / warmup_steps


def _shape(config: ScheduleConfig, batches_per_epoch: int) -> Callable[[int, float], float]:
    """Factor by (step, share of the steps after the warm-up that are done)."""
    low = config.final_factor
    drops = [epoch * batches_per_epoch for epoch in config.step_epochs]
    shapes: dict[str, Callable[[int, float], float]] = {
        "constant": lambda step, done: 1.0,
        "linear": lambda step, done: low + (1 - low) * (1 - done),
        "cosine": lambda step, done: low + (1 - low) * (1 + math.cos(math.pi * done)) / 2,
        "polynomial": lambda step, done: low + (1 - low) * (1 - done) ** config.power,
        "step": lambda step, done: config.step_factor ** sum(step >= drop for drop in drops),
    }
    return shapes[config.kind]
