"""The training loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hpctrain.comm.world import World
from hpctrain.train.clock import Phase, StepClock
from hpctrain.train.data import TrainingData, ValidationData
from hpctrain.train.framework import Framework
from hpctrain.train.hooks import Hook, StopReason, first_reason
from hpctrain.train.plan import Plan
from hpctrain.train.state import TrainState


@dataclass(frozen=True)
class RunSummary:
    """How an attempt ended."""

    reason: StopReason
    step: int
    seconds: float


@dataclass
class Trainer:
    """Everything one rank needs to train; ``build.trainer`` makes it from a run file."""

    world: World
    framework: Framework
    data: TrainingData
    validation: ValidationData | None
    learning_rate: Callable[[int], float]
    """Factor on the optimizer's learning rate, by step."""
    plan: Plan
    clock: StepClock
    hooks: Sequence[Hook]
    state: TrainState

    def fit(self) -> RunSummary:
        """Trains from where the state stands to the end of the plan, or until a hook ends it."""
        begin = time.monotonic()
        for hook in self.hooks:
            hook.before_fit(self)
        reason = self.run_steps()
        for hook in self.hooks:
            hook.after_fit(self, reason)
        return RunSummary(reason, self.state.step, time.monotonic() - begin)

    def run_steps(self) -> StopReason:
        """One update after the other."""
        for batch in self.data.starting_at(self.state):
            self.clock.mark(Phase.DATA)
            self.framework.set_learning_rate(self.learning_rate(self.state.step))
            result = self.framework.step(batch.micro_batches, batch.global_samples)
            self.state.advance(batch)
            reason = first_reason([hook.after_step(self, result) for hook in self.hooks])
            if reason is None and self.plan.evaluates_after(self.state):
                reason = self.evaluate()
            self.clock.mark(Phase.CALLBACKS)
            self.clock.end_step(batch.local_samples)
            if reason is not None:
                return reason
        return StopReason.COMPLETED
