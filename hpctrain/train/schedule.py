"""Length of a run, when it evaluates, and its learning rate: pure functions of the step."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hpctrain.config.sections import ScheduleConfig, TrainConfig
from hpctrain.errors import UserError
from hpctrain.train.state import TrainState


@dataclass(frozen=True)
class Duration:
    """Length of a run and its evaluation intervals, in updates or epochs."""

    total_steps: int
    batches_per_epoch: int
    eval_every_steps: int | None = None
    eval_every_epochs: int | None = None

    def is_over(self, state: TrainState) -> bool:
        """Whether all updates are done."""
        return state.step >= self.total_steps

    def evaluates_after(self, state: TrainState) -> bool:
        """Whether an evaluation is due once this state is reached; always True after the last update."""
        if self.is_over(state):
            return True
        if self.eval_every_steps and state.step % self.eval_every_steps == 0:
            return True
        return bool(self.eval_every_epochs and state.batch == 0 and state.epoch % self.eval_every_epochs == 0)


def duration_of(config: TrainConfig, batches_per_epoch: int) -> Duration:
    """The duration of a run with this number of global batches per epoch."""
    if config.steps is not None:
        total = config.steps
    else:
        assert config.epochs is not None, "TrainConfig holds exactly one of epochs and steps"
        total = config.epochs * batches_per_epoch
    return Duration(total, batches_per_epoch, config.eval_every_steps, config.eval_every_epochs)


def validation_batch(config: TrainConfig, groups: int) -> int:
    """Samples in a rank's validation batch; by default the size of its micro-batches."""
    if config.eval_batch_per_rank is not None:
        return config.eval_batch_per_rank
    return -(-global_batch(config, groups) // (groups * config.accumulate))


def global_batch(config: TrainConfig, groups: int, each: int = 1) -> int:
    """Samples of one update over all ranks.

    Args:
        config: the run's training section.
        groups: groups of ranks that see the same samples; one per rank unless the model is partitioned.
        each: ranks per group.

    Raises:
        UserError: there are fewer samples than groups.
    """
    if config.batch_per_rank is not None:
        return config.batch_per_rank * groups
    assert config.global_batch is not None, "TrainConfig holds exactly one of global_batch and batch_per_rank"
    batch = config.global_batch
    if batch < groups:
        found = f"{groups} ranks" if each == 1 else f"{groups} groups of {each} ranks, each with separate samples"
        raise UserError(
            f"train.global_batch is {batch} but there are {found}: some would never see a sample",
            f"set train.global_batch to {groups} or more, or start at most {batch * each} ranks",
        )
    return batch


@dataclass(frozen=True)
class OwnRates:
    """Means that the optimizer's own scheduler sets its learning rates, so they are left alone."""

    factor: float
    """Factor of the first parameter group, for reports."""


Factors = float | Sequence[float] | OwnRates
"""A factor for all parameter groups, one factor per group, or ``OwnRates``."""
Schedule = Callable[[int], Factors]
"""Maps the number of updates done to the factors for the next one."""
Factor = Callable[[int], float]
"""A schedule with one factor for all groups."""


def sound_factors(factors: Factors, step: int) -> Factors:
    """Returns the factors; raises UserError unless they are finite numbers, since all weights would become NaN."""
    if isinstance(factors, OwnRates):
        return factors
    with contextlib.suppress(TypeError):
        if all(map(math.isfinite, factors if isinstance(factors, Sequence) else [factors])):
            return factors
    raise UserError(f"the schedule gives {factors!r} after {step} updates", "return a finite number, or a list of them")


def first_factor(factors: Factors) -> float:
    """Factor of the first parameter group."""
    if isinstance(factors, OwnRates):
        return factors.factor
    return float(factors[0] if isinstance(factors, Sequence) else factors)


def make_schedule(
    config: ScheduleConfig, global_batch: int, ranks: int, total_steps: int, batches_per_epoch: int
) -> Factor:
    """Builds the learning-rate schedule of a run.

    Args:
        config: the run file's schedule section.
        global_batch: samples of one update over all ranks.
        ranks: data-parallel ranks; without ``base_batch``, the optimizer's rate is taken to be for one rank's batch.
        total_steps: updates of the whole run.
        batches_per_epoch: updates of one epoch.
    """
    peak = scale(config.scaling, global_batch / (config.base_batch or global_batch / ranks))
    warmup = config.warmup_steps or round((config.warmup_epochs or 0) * batches_per_epoch)
    shape = _shape(config, total_steps, warmup, batches_per_epoch)

    def factor(step: int) -> float:
        return warm_up(step, warmup, peak) if step < warmup else peak * shape(step)

    return factor


def scale(rule: str, growth: float) -> float:
    """Factor for a batch ``growth`` times as large: linear (Goyal et al. 2017, section 2.1) or square root."""
    return {"none": 1.0, "linear": growth, "sqrt": math.sqrt(growth)}[rule]


def warm_up(step: int, warmup_steps: int, peak: float) -> float:
    """Gradual warm-up (Goyal et al. 2017, section 2.2): linear from the unscaled rate to ``peak``.

    If the rate is not scaled up (``peak`` is at most 1), it starts from zero.
    """
    start = 1.0 if peak > 1 else 0.0
    return start + (peak - start) * (step + 1) / warmup_steps


def half_cosine(begin: float, end: float, done: float) -> float:
    """Half a cosine from one value to another, for ``done`` from 0 to 1."""
    return end + (begin - end) * (1 + math.cos(math.pi * done)) / 2


def in_cycle(position: float, length: float, growth: float) -> float:
    """Completed fraction of the cycle at a position; each cycle is ``growth`` times as long as the previous one."""
    if growth == 1:
        return position / length % 1
    while position >= length:
        position -= length
        length *= growth
    return position / length


def _shape(config: ScheduleConfig, total_steps: int, warmup: int, batches_per_epoch: int) -> Factor:
    """The factor by step, from the end of the warm-up onwards."""
    low = config.final_factor
    drops = [epoch * batches_per_epoch for epoch in config.step_epochs]
    cycle = (config.cycle_epochs or 1) * batches_per_epoch
    climb = config.climb_share * total_steps
    fall = min(max(config.decay_share * total_steps, 1), max(total_steps - warmup, 1))

    def share(step: int) -> float:
        return min((step - warmup) / max(total_steps - warmup, 1), 1.0)

    def one_cycle(step: int) -> float:
        if step < climb:
            return half_cosine(config.start_factor, 1.0, step / climb)
        return half_cosine(1.0, low, min((step - climb) / max(total_steps - climb, 1), 1.0))

    shapes: dict[str, Factor] = {
        "constant": lambda step: 1.0,
        "linear": lambda step: low + (1 - low) * (1 - share(step)),
        "cosine": lambda step: half_cosine(1.0, low, share(step)),
        "polynomial": lambda step: low + (1 - low) * (1 - share(step)) ** config.power,
        "step": lambda step: config.step_factor ** sum(step >= drop for drop in drops),
        "exponential": lambda step: config.decay_factor ** ((step - warmup) / batches_per_epoch),
        "restarts": lambda step: half_cosine(1.0, low, in_cycle(step - warmup, cycle, config.cycle_growth)),
        "one_cycle": one_cycle,
        "wsd": lambda step: low + (1 - low) * min(max((total_steps - step) / fall, 0.0), 1.0),
        "plateau": lambda step: 1.0,
    }
    return shapes[config.kind]
