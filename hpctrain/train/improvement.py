"""Ends a run, or lowers its learning rate, when a validation metric no longer improves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpctrain.config.sections import EarlyStopConfig, PlateauConfig
from hpctrain.errors import UserError
from hpctrain.train.hooks import BaseHook, RateHook, StopReason, Training
from hpctrain.train.schedule import Schedule, first_factor


class EarlyStop(BaseHook):
    """Counts evaluations since the best one; best and count are saved with the run."""

    name = "early_stop"

    def __init__(self, config: EarlyStopConfig) -> None:
        self.config = config
        self.best: float | None = None
        self.evaluations_since_best = 0

    def before_fit(self, training: Training) -> StopReason | None:
        """A run that has ended early stays so when it is started again, unless it is given more patience."""
        return self._verdict()

    def after_eval(self, training: Training, metrics: Mapping[str, float]) -> StopReason | None:
        """Every rank holds the same averages, so all decide the same."""
        watched = self.config.metric
        if watched is None or watched not in metrics:
            raise UserError(
                f"train.early_stop.metric is {watched!r}, which the task does not report",
                f"name one of {', '.join(sorted(metrics))}",
            )
        if improves(metrics[watched], self.best, self.config):
            self.best = metrics[watched]
            self.evaluations_since_best = 0
            return None
        self.evaluations_since_best += 1
        return self._verdict()

    def state_dict(self) -> dict[str, Any]:
        return {
            "metric": self.config.metric,
            "mode": self.config.mode,
            "best": self.best,
            "evaluations_since_best": self.evaluations_since_best,
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """The count of another metric means nothing for this one."""
        if (saved["metric"], saved["mode"]) == (self.config.metric, self.config.mode):
            self.best = saved["best"]
            self.evaluations_since_best = saved["evaluations_since_best"]

    def _verdict(self) -> StopReason | None:
        return StopReason.EARLY if self.evaluations_since_best >= self.config.patience else None


def improves(value: float, best: float | None, config: EarlyStopConfig | PlateauConfig) -> bool:
    """Whether a value is better than the best one by more than min_delta; NaN never is."""
    if best is None:
        return value == value
    gain = best - value if config.mode == "min" else value - best
    return gain > config.min_delta


class Plateau(RateHook):
    """Counts evaluations since the best one, and lowers the rate after too many; all of that is saved with the run.

    Args:
        config: what to watch.
        lowest: factor below which the rate is not lowered.
    """

    name = "plateau"

    def __init__(self, config: PlateauConfig, lowest: float) -> None:
        self.config = config
        self.lowest = lowest
        self.factor = 1.0
        self.best: float | None = None
        self.evaluations_since_best = 0
        self.cooldown = 0

    def adjusted(self, schedule: Schedule) -> Schedule:
        return lambda step: first_factor(schedule(step)) * self.factor

    def after_eval(self, training: Training, metrics: Mapping[str, float]) -> StopReason | None:
        """Every rank holds the same averages, so all decide the same."""
        if self.config.metric not in metrics:
            raise UserError(
                f"schedule.plateau.metric is {self.config.metric!r}, which the task does not report",
                f"name one of {', '.join(sorted(metrics))}",
            )
        value = metrics[self.config.metric]
        if improves(value, self.best, self.config):
            self.best, self.evaluations_since_best = value, 0
        elif self.cooldown == 0:
            self.evaluations_since_best += 1
        self.cooldown = max(self.cooldown - 1, 0)
        if self.evaluations_since_best >= self.config.patience:
            self.factor = max(self.factor * self.config.factor, self.lowest)
            self.evaluations_since_best, self.cooldown = 0, self.config.cooldown
        return None

    def state_dict(self) -> dict[str, Any]:
        return {
            "factor": self.factor,
            "best": self.best,
            "evaluations_since_best": self.evaluations_since_best,
            "cooldown": self.cooldown,
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self.factor, self.best = saved["factor"], saved["best"]
        self.evaluations_since_best, self.cooldown = saved["evaluations_since_best"], saved["cooldown"]
