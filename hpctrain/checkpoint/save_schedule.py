"""When a run saves: by position, by the clock, again after a failure, and whenever the watched metric is the best."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from hpctrain.checkpoint.policy import Cost, Policy
from hpctrain.config.sections import CheckpointConfig
from hpctrain.train.state import TrainState
from hpctrain.train.watchers import unreported


class SaveSchedule:
    """Decides when a checkpoint is due. Only the clock differs between ranks: rank 0's counts.

    Args:
        policy: the rules.
        config: names the metric to watch, and how to save.
    """

    def __init__(self, policy: Policy, config: CheckpointConfig) -> None:
        self.policy, self.config = policy, config
        self.best: float | None = None
        """Best value of the watched metric."""
        self.best_saved: float | None = None
        """The best of those saved, on which others must improve if the save of a better one fails."""
        self.is_best = False
        """Whether the current state has that value, and is not being saved yet."""
        self.is_due = False
        self.cost: Cost | None = None
        """Cost of the last checkpoint."""
        self.stall_s = 0.0
        """Seconds that the last snapshot took."""
        self.failures = 0
        """Failed saves in a row."""
        self.last_s = time.monotonic()
        """When the last save began or failed."""

    def begin(self, is_due: bool) -> None:
        """Training begins, with a save at once if one is due."""
        self.is_due, self.last_s = is_due, time.monotonic()

    def look(self, metrics: Mapping[str, float]) -> None:
        """Note whether the watched metric is better than before. Raises UserError if the task does not report it."""
        watched = self.config.best_metric
        if watched is None:
            return
        if watched not in metrics:
            raise unreported("checkpoint.best_metric", watched, metrics)
        value = metrics[watched]
        sign = 1 if self.config.best_mode == "min" else -1
        if math.isfinite(value) and (self.best is None or sign * value < sign * self.best):
            self.best, self.is_best = value, True

    def begins(self, state: TrainState, by_clock: bool, idle: bool) -> bool:
        """Whether a save begins now. What is due waits until no other save is in flight, but not the best state."""
        self.is_due = self.is_due or by_clock or self.policy.due_at(state.step, state.epoch, state.batch == 0)
        return self.is_best or (self.is_due and idle)

    def is_late(self) -> bool:
        """Whether a save is due by this rank's clock."""
        interval_s = self.policy.interval_s(self.cost)
        if self.failures:
            interval_s = min(interval_s, self.policy.retry_s(self.failures, self.stall_s))
        return time.monotonic() - self.last_s >= interval_s

    def begun(self, begin: float) -> None:
        """A snapshot, begun at this monotonic time, has been taken."""
        self.is_due = self.is_best = False
        self.last_s = time.monotonic()
        self.stall_s = self.last_s - begin

    def failed(self, loses_best: bool) -> int:
        """A save has failed, perhaps that of the best state; returns how many have, in a row."""
        self.best = self.best_saved if loses_best else self.best
        self.failures += 1
        self.last_s = time.monotonic()
        return self.failures

    def saved(self, write_s: float, best: float | None) -> Cost:
        """A save has succeeded, and with it, if it was the best, this value; returns its cost."""
        self.failures = 0
        self.best_saved = self.best_saved if best is None else best
        self.cost = Cost(write_s if self.config.mode == "sync" else self.stall_s, write_s)
        return self.cost

    def state_dict(self) -> dict[str, Any]:
        """The best value of the watched metric."""
        if self.config.best_metric is None:
            return {}
        return {"metric": self.config.best_metric, "mode": self.config.best_mode, "best": self.best}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore the best value, unless it is of a different metric or mode."""
        if (saved["metric"], saved["mode"]) == (self.config.best_metric, self.config.best_mode):
            self.best = self.best_saved = saved["best"]
