"""Ends a run whose validation metric no longer improves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hpctrain.config.sections import EarlyStopConfig, PlateauConfig
from hpctrain.errors import UserError
from hpctrain.train.hooks import BaseHook, StopReason

if TYPE_CHECKING:
    from hpctrain.train.training import Training


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
