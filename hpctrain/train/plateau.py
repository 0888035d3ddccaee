"""Lowers the learning rate when a validation metric no longer improves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hpctrain.config.sections import PlateauConfig
from hpctrain.errors import UserError
from hpctrain.train.early_stop import improves
from hpctrain.train.hooks import RateHook, StopReason
from hpctrain.train.schedule import Schedule, first_factor

if TYPE_CHECKING:
    from hpctrain.train.training import Training


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
