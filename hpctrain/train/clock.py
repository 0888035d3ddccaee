"""Where the time of a step goes: phases that the loop, the framework and the reducer mark as they end them."""

from __future__ import annotations

import enum
import time
from typing import Protocol


class Phase(enum.IntEnum):
    """Parts of a step, in the order in which they happen."""

    DATA = 0
    """Waiting for the next batch."""
    TO_DEVICE = 1
    """Moving it to the device."""
    FORWARD = 2
    """Forward pass and loss."""
    BACKWARD = 3
    """Backward pass until this rank's last gradient is ready: its end is the rank's arrival."""
    EXCHANGE = 4
    """Waiting until the averaged gradients are there: its end is the rank's exit."""
    OPTIMIZER = 5
    """Clipping, update, EMA."""
    CALLBACKS = 6
    """Hooks, logging, evaluation."""
    CHECKPOINT = 7
    """Training stopped for a checkpoint's snapshot."""


class Neighbours(enum.IntEnum):
    """Whom a rank waits for in the middle of a phase."""

    NOBODY = 0
    TENSOR = 1
    """Those that hold parts of its model's layers."""
    PIPELINE = 2
    """Those that have the layers before and behind its own."""
    TABLES = 3
    """Those that have other rows of its tables."""
    GRADIENTS = 4
    """Those that keep other slices of the gradients."""


class StepClock(Protocol):
    """Receives the ends of phases. All times are of this rank's monotonic clock."""

    def mark(self, phase: Phase) -> None:
        """The time since the last mark belongs to this phase."""

    def mark_past(self, phase: Phase, ago_s: float) -> None:
        """The same of a phase that ended this many seconds ago, or with the last mark if that was later."""

    def end_step(self, work: float) -> None:
        """A step is complete; ``work``: what it had to do (samples or tokens), which excuses loaded ranks."""

    def begin_wait(self, whom: Neighbours) -> None:
        """From now on this rank does nothing but wait for others, in the middle of a phase."""

    def end_wait(self) -> None:
        """They have come. The time since ``begin_wait`` is Phase.EXCHANGE's; the phase continues."""


class NoClock:
    """For what is not a step: rehearsals, and models that are not trained."""

    def mark(self, phase: Phase) -> None:
        """See StepClock."""

    def mark_past(self, phase: Phase, ago_s: float) -> None:
        """See StepClock."""

    def end_step(self, work: float) -> None:
        """See StepClock."""

    def begin_wait(self, whom: Neighbours) -> None:
        """See StepClock."""

    def end_wait(self) -> None:
        """See StepClock."""


NO_CLOCK = NoClock()


class Waiting:
    """``with waiting: ...``: the time inside is a wait for neighbours. Made once: a step makes no garbage."""

    def __init__(self, clock: StepClock, neighbours: Neighbours = Neighbours.TENSOR) -> None:
        self.clock, self.neighbours = clock, neighbours

    def __enter__(self) -> None:
        self.clock.begin_wait(self.neighbours)

    def __exit__(self, *error: object) -> None:
        self.clock.end_wait()


class IntervalClock:
    """Sums each phase's seconds until they are taken."""

    def __init__(self) -> None:
        self.seconds = [0.0] * len(Phase)
        self.last = time.perf_counter()
        self.wait_began = self.last

    def mark(self, phase: Phase) -> None:
        now = time.perf_counter()
        self.seconds[phase] += now - self.last
        self.last = now

    def mark_past(self, phase: Phase, ago_s: float) -> None:
        ended = past(time.perf_counter(), ago_s, self.last)
        self.seconds[phase] += ended - self.last
        self.last = ended

    def end_step(self, work: float) -> None:
        """See StepClock."""

    def begin_wait(self, whom: Neighbours) -> None:
        self.wait_began = time.perf_counter()

    def end_wait(self) -> None:
        waited = time.perf_counter() - self.wait_began
        self.seconds[Phase.EXCHANGE] += waited
        self.last += waited

    def take(self) -> dict[str, float]:
        """Seconds by phase name since the last call."""
        taken = {phase.name.lower(): self.seconds[phase] for phase in Phase}
        self.seconds = [0.0] * len(Phase)
        return taken


def past(now: float, ago_s: float, last: float) -> float:
    """When a phase ended: neither before the last mark nor after now, however clocks are set meanwhile."""
    return max(last, min(now, now - ago_s))
