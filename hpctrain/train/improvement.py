"""Ends a run, or lowers its learning rate, when a validation metric no longer improves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpctrain.config.sections import EarlyStopConfig, PlateauConfig, ScheduleConfig
from hpctrain.errors import UserError
from hpctrain.train.hooks import BaseHook, RateHook, StopReason, Training
from hpctrain.train.schedule import Schedule, first_factor


class Best:
    """The best value of a validation metric, and how many evaluations have not improved on it; saved with the run.

    Args:
        config: what to watch.
        key: of the section, for people.
    """

    def __init__(self, config: EarlyStopConfig | PlateauConfig, key: str) -> None:
        self.config, self.key = config, key
        self.value: float | None = None
        self.evaluations_since = 0

    def look(self, metrics: Mapping[str, float], counts: bool = True) -> None:
        """Notes a new best value, or that there is none, which may not count.

        Every rank holds the same averages, so all decide the same. Raises UserError if the task does not report the
        metric.
        """
        watched = self.config.metric
        if watched is None or watched not in metrics:
            raise UserError(
                f"{self.key}.metric is {watched!r}, which the task does not report",
                f"name one of {', '.join(sorted(metrics))}",
            )
        if improves(metrics[watched], self.value, self.config):
            self.value, self.evaluations_since = metrics[watched], 0
        else:
            self.evaluations_since += counts

    @property
    def patience_ends(self) -> bool:
        """Whether there have been too many evaluations without a new best value."""
        return self.evaluations_since >= self.config.patience

    def begin_again(self) -> None:
        """Counts from 0."""
        self.evaluations_since = 0

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.value, "evaluations_since_best": self.evaluations_since}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self.value, self.evaluations_since = saved["best"], saved["evaluations_since_best"]


def improves(value: float, best: float | None, config: EarlyStopConfig | PlateauConfig) -> bool:
    """Whether a value is better than the best one by more than min_delta; NaN never is."""
    if best is None:
        return value == value
    gain = best - value if config.mode == "min" else value - best
    return gain > config.min_delta


class EarlyStop(BaseHook):
    """Ends a run after too many evaluations without a new best value."""

    name = "early_stop"

    def __init__(self, config: EarlyStopConfig) -> None:
        self.config, self.best = config, Best(config, "train.early_stop")

    def before_fit(self, training: Training) -> StopReason | None:
        """A run that has ended early stays so when it is started again, unless it is given more patience."""
        return self._verdict()

    def after_eval(self, training: Training, metrics: Mapping[str, float]) -> StopReason | None:
        self.best.look(metrics)
        return self._verdict()

    def state_dict(self) -> dict[str, Any]:
        return {"metric": self.config.metric, "mode": self.config.mode, **self.best.state_dict()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """The count of another metric means nothing for this one."""
        if (saved["metric"], saved["mode"]) == (self.config.metric, self.config.mode):
            self.best.load_state_dict(saved)

    def _verdict(self) -> StopReason | None:
        return StopReason.EARLY if self.best.patience_ends else None


class Plateau(RateHook):
    """Lowers the rate after too many evaluations without a new best value.

    Args:
        config: what to watch.
        lowest: factor below which the rate is not lowered.
    """

    name = "plateau"

    def __init__(self, config: PlateauConfig, lowest: float) -> None:
        self.config, self.lowest, self.best = config, lowest, Best(config, "schedule.plateau")
        self.factor, self.cooldown = 1.0, 0

    def adjusted(self, schedule: Schedule) -> Schedule:
        return lambda step: first_factor(schedule(step)) * self.factor

    def after_eval(self, training: Training, metrics: Mapping[str, float]) -> StopReason | None:
        self.best.look(metrics, counts=self.cooldown == 0)
        self.cooldown = max(self.cooldown - 1, 0)
        if self.best.patience_ends:
            self.factor = max(self.factor * self.config.factor, self.lowest)
            self.best.begin_again()
            self.cooldown = self.config.cooldown
        return None

    def state_dict(self) -> dict[str, Any]:
        return {"factor": self.factor, "cooldown": self.cooldown, **self.best.state_dict()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self.best.load_state_dict(saved)
        self.factor, self.cooldown = saved["factor"], saved["cooldown"]


def watching(early_stop: EarlyStopConfig, schedule: ScheduleConfig) -> list[BaseHook]:
    """The hooks of a run that watch validation metrics and have state."""
    found: list[BaseHook] = [] if early_stop.metric is None else [EarlyStop(early_stop)]
    if schedule.kind == "plateau":
        found.append(Plateau(schedule.plateau, schedule.final_factor))
    return found
