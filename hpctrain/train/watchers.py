"""Hooks that watch a run: early stopping, plateaus, comparing weights between ranks, profiling."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hpctrain.config.sections import EarlyStopConfig, PlateauConfig, ProfileConfig, ScheduleConfig
from hpctrain.errors import NoRequeue, UserError
from hpctrain.system.gpus import hardware
from hpctrain.train.framework import StepResult
from hpctrain.train.hooks import BaseHook, RateHook, StopReason, Training
from hpctrain.train.schedule import Schedule, first_factor


def unreported(key: str, metric: str | None, known: Iterable[str]) -> UserError:
    """The error for a key that names a metric the task does not report."""
    return UserError(f"{key} is {metric!r}, which the task does not report", f"name one of {', '.join(sorted(known))}")


@dataclass(eq=False)
class BestMetric:
    """The best value of a validation metric, and how many evaluations have not improved on it; saved with the run."""

    config: EarlyStopConfig | PlateauConfig
    """What to watch."""
    key: str
    """The section's name, for messages."""
    value: float | None = None
    evaluations_since: int = 0

    def look(self, metrics: Mapping[str, float], counts: bool = True) -> None:
        """Records a new best value, or else counts an evaluation without one (unless ``counts`` is False).

        All ranks get the same averages, so all decide the same. Raises UserError if the task lacks the metric.
        """
        watched = self.config.metric
        if watched is None or watched not in metrics:
            raise unreported(f"{self.key}.metric", watched, metrics)
        if improves(metrics[watched], self.value, self.config):
            self.value, self.evaluations_since = metrics[watched], 0
        else:
            self.evaluations_since += counts

    @property
    def patience_ends(self) -> bool:
        """Whether there have been too many evaluations without a new best value."""
        return self.evaluations_since >= self.config.patience

    def begin_again(self) -> None:
        """Resets the count to 0."""
        self.evaluations_since = 0

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.value, "evaluations_since_best": self.evaluations_since}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self.value = saved["best"]
        self.evaluations_since = saved["evaluations_since_best"]


def improves(value: float, best: float | None, config: EarlyStopConfig | PlateauConfig) -> bool:
    """Whether a value beats the best one by more than min_delta; a NaN never does."""
    if best is None:
        return value == value
    gain = best - value if config.mode == "min" else value - best
    return gain > config.min_delta


class EarlyStop(BaseHook):
    """Ends a run after too many evaluations without a new best value."""

    name = "early_stop"

    def __init__(self, config: EarlyStopConfig) -> None:
        self.config, self.best = config, BestMetric(config, "train.early_stop")

    def before_fit(self, training: Training) -> StopReason | None:
        """A run that stopped early stops again when restarted, unless it is given more patience."""
        return self._verdict()

    def after_eval(self, training: Training, metrics: Mapping[str, float]) -> StopReason | None:
        self.best.look(metrics)
        return self._verdict()

    def state_dict(self) -> dict[str, Any]:
        return {"metric": self.config.metric, "mode": self.config.mode, **self.best.state_dict()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Keeps the saved count only if it is for the same metric and mode."""
        if (saved["metric"], saved["mode"]) == (self.config.metric, self.config.mode):
            self.best.load_state_dict(saved)

    def _verdict(self) -> StopReason | None:
        return StopReason.EARLY if self.best.patience_ends else None


class Plateau(RateHook):
    """Lowers the rate after too many evaluations without a new best value.

    Args:
        config: what to watch.
        lowest: lower limit of the factor on the rate.
    """

    name = "plateau"

    def __init__(self, config: PlateauConfig, lowest: float) -> None:
        self.config, self.lowest, self.best = config, lowest, BestMetric(config, "schedule.plateau")
        self.factor, self.cooldown = 1.0, 0

    def adjusted(self, schedule: Schedule) -> Schedule:
        return lambda step: first_factor(schedule(step)) * self.factor

    def after_eval(self, training: Training, metrics: Mapping[str, float]) -> None:
        self.best.look(metrics, counts=self.cooldown == 0)
        self.cooldown = max(self.cooldown - 1, 0)
        if self.best.patience_ends:
            self.factor = max(self.factor * self.config.factor, self.lowest)
            self.best.begin_again()
            self.cooldown = self.config.cooldown

    def state_dict(self) -> dict[str, Any]:
        return {"factor": self.factor, "cooldown": self.cooldown, **self.best.state_dict()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self.best.load_state_dict(saved)
        self.factor, self.cooldown = saved["factor"], saved["cooldown"]


def watching(early_stop: EarlyStopConfig, schedule: ScheduleConfig) -> list[BaseHook]:
    """The hooks that a run needs to watch its validation metrics."""
    plateau = [Plateau(schedule.plateau, schedule.final_factor)] if schedule.kind == "plateau" else []
    return [*([] if early_stop.metric is None else [EarlyStop(early_stop)]), *plateau]


class VerifyWeights(BaseHook):
    """Fails the run, on every rank, as soon as a rank's weights differ in any bit from their reference copy.

    Replicated weights are compared with those of the first rank of the same pipeline stage, sharded ones with the
    corresponding rank of the stage's first tensor group.

    Args:
        every_steps: compare every N steps; None: only after the first step, which finds weights that depend on the
            rank or on its samples, such as those that forward initialises. Ranks on other hardware, which may round
            otherwise, are then left out.
    """

    def __init__(self, every_steps: int | None) -> None:
        self.every_steps = every_steps
        self.steps = 0
        """Steps of this attempt."""

    def after_step(self, training: Training, result: StepResult) -> None:
        step = training.state.step
        world = training.world
        framework = training.framework
        self.steps += 1
        is_due = self.steps == 1 if self.every_steps is None else step % self.every_steps == 0
        if not is_due:
            return
        shared = framework.weights_hash(shared_only=True) if world.tensor.size > 1 else ""
        kind = hardware() if self.every_steps is None else ""
        hashes = world.everyone.allgather([framework.weights_hash(), shared, kind], "compare the weights")
        if odd := deviating(hashes, world.tensor.size, len(hashes) // world.pipeline.size):
            shown = " and those of ".join(
                f"rank {', '.join(map(str, ranks))} differ from those of rank {one}" for one, ranks in odd.items()
            )
            raise NoRequeue(
                f"after step {step} the weights of {shown}",
                "look for code in the task that changes weights by itself or depends on the rank, and initialise "
                "weights in the task's function, not in forward; else suspect the hardware or MPI of these ranks",
            )


def deviating(hashes: Sequence[Sequence[str]], tensor: int, stage: int) -> dict[int, list[int]]:
    """Ranks with other weights than the rank they are compared with, by the latter.

    Args:
        hashes: each rank's hash of all its weights, hash of those that a tensor group shares, and hardware.
        tensor: ranks of a tensor group.
        stage: ranks of a pipeline stage.
    """
    odd: dict[int, list[int]] = {}
    for rank, (own, shared, kind) in enumerate(hashes):
        first = rank - rank % stage
        peer = first + rank % tensor
        if hashes[first][2] == kind and hashes[first][1] != shared:
            odd.setdefault(first, []).append(rank)
        elif hashes[peer][2] == kind and hashes[peer][0] != own:
            odd.setdefault(peer, []).append(rank)
    return odd


STEPS = 5
"""Number of profiled steps if no last step is given."""


class Profiler(Protocol):
    """A framework's profiler; makes one recording at a time."""

    def start(self, target: Path) -> None:
        """Begins a recording. ``target`` is a path in an existing folder, without a suffix."""

    def show(self, name: str) -> None:
        """Ends the range begun by the last call, and begins one with this name, unless it is empty."""

    def stop(self) -> None:
        """Ends the recording and writes the trace. Raises OSError."""

    def abandon(self) -> None:
        """Ends the recording without writing the rest of it."""


class Profile(BaseHook):
    """Starts and stops a profiler at the steps of ``track.profile``.

    Args:
        config: which steps and ranks to profile; ``first_step`` is set.
        profiler: the framework's.
        warn: warns the user that a trace could not be written; training continues.
    """

    def __init__(self, config: ProfileConfig, profiler: Profiler, warn: Callable[[str], None]) -> None:
        self.ranks = config.ranks
        self.first = config.first_step or 1
        self.last = config.last_step or self.first + STEPS - 1
        self.profiler = profiler
        self.warn = warn
        self.records = False

    def before_fit(self, training: Training) -> None:
        self._look(training)

    def after_step(self, training: Training, result: StepResult) -> None:
        self._look(training)

    def after_fit(self, training: Training, reason: StopReason) -> None:
        """Writes what was recorded if the run ends before the last profiled step."""
        self._stop()

    def close(self) -> None:
        if self.records:
            self.profiler.abandon()

    def _look(self, training: Training) -> None:
        """Starts or stops the profiler between two steps."""
        done, rank = training.state.step, training.world.rank
        if self.records and done >= self.last:
            self._stop()
        elif not self.records and rank in self.ranks and self.first <= done + 1 <= self.last:
            try:
                folder = training.folder / "profile"
                folder.mkdir(parents=True, exist_ok=True)
                self.profiler.start(folder / f"rank-{rank:05d}-from-step-{done + 1:09d}")
                self.records = True
            except OSError as error:
                self.warn(f"no profile: {error.strerror or error}; training continues")
                self.ranks = ()

    def _stop(self) -> None:
        if self.records:
            self.records = False
            try:
                self.profiler.stop()
            except OSError as error:
                self.warn(f"the profile could not be written: {error.strerror or error}; training continues")
