"""Ends a run whose validation metric no longer improves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from hpctrain.config.sections import EarlyStopConfig
from hpctrain.errors import UserError
from hpctrain.train.hooks import BaseHook, StopReason

if TYPE_CHECKING:
    from hpctrain.train.training import Training


class EarlyStop(BaseHook):
    """Counts evaluations since the best one; best and count live in the run's state, so that they survive a resume."""

    def __init__(self, config: EarlyStopConfig) -> None:
        self.config = config

    def before_fit(self, training: Training) -> StopReason | None:
        """A run that has ended early stays so when it is started again, unless it is given more patience."""
        return self._verdict(training)

    def after_eval(self, training: Training, metrics: Mapping[str, float]) -> StopReason | None:
        """Every rank holds the same averages, so all decide alike."""
        watched = self.config.metric
        if watched is None or watched not in metrics:
            raise UserError(
                f"train.early_stop.metric is {watched!r}, which the task does not report",
                f"name one of {', '.join(sorted(metrics))}",
            )
        state = training.state
        if improves(metrics[watched], state.early_stop_best, self.config):
            state.early_stop_best = metrics[watched]
            state.evaluations_since_best = 0
            return None
        state.evaluations_since_best += 1
        return self._verdict(training)

    def _verdict(self, training: Training) -> StopReason | None:
        return StopReason.EARLY if training.state.evaluations_since_best >= self.config.patience else None


def improves(value: float, best: float | None, config: EarlyStopConfig) -> bool:
    """Whether a value is better than the best one by more than min_delta; NaN never is."""
    if best is None:
        return value == value
    gain = best - value if config.mode == "min" else value - best
    return gain > config.min_delta
