"""The monitor in the training loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpctrain.monitor.rank.session import Session
from hpctrain.train.hooks import BaseHook, StopReason

if TYPE_CHECKING:
    from hpctrain.train.framework import StepResult
    from hpctrain.train.training import Training

PRINT_STEPS = 32
"""Steps between looks at what the monitor has to say."""


class MonitorHook(BaseHook):
    """Prints what the monitor says, and ends it with the run. The watching itself is the clock's and the agent's.

    Args:
        session: started before the loop was built, since the framework marks its phases on the session's clock.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.steps = 0
        self.orderly = False

    def before_fit(self, training: Training) -> None:
        self.session.has_layers(training.framework.num_layers)
        self.session.await_agent()

    def after_step(self, training: Training, result: StepResult) -> StopReason | None:
        if self.steps == 0:
            self.session.starts_at(training.state.step - 1)
        self.steps += 1
        if self.steps % PRINT_STEPS == 0:
            self.session.poll()
        return None

    def after_fit(self, training: Training, reason: StopReason) -> None:
        self.orderly = True

    def close(self) -> None:
        self.session.close(self.orderly)
