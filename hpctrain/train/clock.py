"""Step timing: the loop, the framework and the reducer mark each phase of a step as it ends."""

from __future__ import annotations

import enum
import time
from typing import Protocol


class Phase(enum.IntEnum):
    """Parts of a step, in the order in which they happen."""

    DATA = 0
    """Waiting for the next batch."""
    TO_DEVICE = 1
    """Moving the batch to the device."""
    FORWARD = 2
    """Forward pass and loss."""
    BACKWARD = 3
    """Backward pass until this rank's last gradient is ready; its end is when the rank arrives at the exchange."""
    EXCHANGE = 4
    """Waiting for the averaged gradients; its end is when the rank leaves the exchange."""
    OPTIMIZER = 5
    """Clipping, update, EMA."""
    CALLBACKS = 6
    """Hooks, logging, evaluation."""
    CHECKPOINT = 7
    """Training paused for a checkpoint's snapshot."""


class Neighbours(enum.IntEnum):
    """Which ranks a rank waits for in the middle of a phase."""

    NOBODY = 0
    TENSOR = 1
    """The other ranks of its tensor group."""
    PIPELINE = 2
    """The ranks of the previous and next pipeline stages."""


class StepClock(Protocol):
    """Receives the ends of phases. All times are on this rank's monotonic clock."""

    def mark(self, phase: Phase) -> None:
        """Attributes the time since the last mark to this phase."""

    def mark_ahead(self, phase: Phase) -> None:
        """Ends a phase on a device, at this point of its queue, before the host's own ``mark`` of it."""

    def mark_past(self, phase: Phase, ago_s: float) -> None:
        """Like ``mark``, for a phase that ended this many seconds ago, but not before the last mark."""

    def end_step(self, work: float) -> None:
        """Ends a step. ``work`` is its load (samples or tokens), so that busier ranks are not taken for slow ones."""

    def begin_wait(self, whom: Neighbours) -> None:
        """In the middle of a phase, this rank starts waiting for others and does nothing else."""

    def end_wait(self) -> None:
        """The wait is over. The time since ``begin_wait`` counts as Phase.EXCHANGE; the interrupted phase continues."""


class Waiting:
    """``with waiting: ...``: counts the time inside as a wait for neighbours. Reusable, so steps allocate nothing."""

    def __init__(self, clock: StepClock, neighbours: Neighbours = Neighbours.TENSOR) -> None:
        self.clock, self.neighbours = clock, neighbours

    def __enter__(self) -> None:
        self.clock.begin_wait(self.neighbours)

    def __exit__(self, *error: object) -> None:
        self.clock.end_wait()


class IntervalClock:
    """Sums the seconds of each phase until ``take`` is called."""

    def __init__(self) -> None:
        self.seconds = [0.0] * len(Phase)
        self.last = time.perf_counter()
        self.wait_began = self.last

    def mark(self, phase: Phase) -> None:
        now = time.perf_counter()
        self.seconds[phase] += now - self.last
        self.last = now

    def mark_ahead(self, phase: Phase) -> None:
        """Does nothing: the times are the host's."""

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


NO_CLOCK = IntervalClock()
"""A clock whose times are not read, for rehearsals and for models that are not trained."""


def past(now: float, ago_s: float, last: float) -> float:
    """When a phase ended, clamped between the last mark and now in case clocks were adjusted."""
    return max(last, min(now, now - ago_s))
