"""The phase clock of one rank: a few time stamps a step, left in shared memory. It never waits and makes no garbage."""

from __future__ import annotations

import gc
import struct
from time import monotonic
from typing import Protocol

from hpctrain.monitor.shared import MARKED_AT, MARKED_PHASE, NO_PHASE, ROW, STEPS, WAITS_FOR, Slot, own_slot
from hpctrain.monitor.window import ENDED, GC, REST, WORK
from hpctrain.train.clock import Neighbours, Phase, past

PACK_ROW = struct.Struct(f"{ROW}d").pack_into


class Marks(Protocol):
    """What may take a RingClock's marks; see StepClock."""

    def mark(self, phase: int) -> None:
        """The time since the last mark belongs to this phase."""

    def end_step(self, work: float = 1.0) -> None:
        """A step is complete."""

    def end_wait(self) -> None:
        """A wait for others is over, which began with the clock's ``begin_wait``."""


class RingClock:
    """A StepClock whose marks the node's agent can read.

    Keeps running totals of the seconds in each phase; at the end of a step they become a row of the ring. Differences
    of rows are what steps took. A hand-written loop uses ``phase``, ``arrived``, ``left`` and ``end_step``.

    Args:
        slot: this rank's part of the node's shared memory; private memory if not given.
    """

    def __init__(self, slot: Slot | None = None) -> None:
        self.slot = slot or own_slot()
        self.head = self.slot.head
        self.totals = [0.0] * ROW
        self.taken = [0.0] * ROW
        self.published = 0
        self.last = monotonic()
        self.gc_began = 0.0
        self.wait_began = self.last
        self.scopes = {phase.name.lower(): Scope(self, phase) for phase in Phase}
        self.watches_gc = False

    def mark(self, phase: int) -> None:
        """See StepClock. About a third of a microsecond."""
        now = monotonic()
        self.totals[phase] += now - self.last
        self.last = now
        head = self.head
        head[MARKED_AT] = now
        head[MARKED_PHASE] = phase

    def mark_past(self, phase: int, ago_s: float) -> None:
        """See StepClock."""
        ended = past(monotonic(), ago_s, self.last)
        self.totals[phase] += ended - self.last
        self.last = ended

    def end_step(self, work: float = 1.0) -> None:
        """A step is complete. Time that no phase claimed since the last mark is the step's rest.

        Args:
            work: what the step had to do on this rank, such as samples: a rank with more of it is loaded, not slow.
        """
        now = monotonic()
        totals = self.totals
        totals[REST] += now - self.last
        totals[WORK] += work
        totals[ENDED] = now
        self.last = now
        head = self.head
        head[MARKED_AT] = now
        head[MARKED_PHASE] = NO_PHASE
        self.publish()

    def begin_wait(self, whom: Neighbours) -> None:
        """See StepClock."""
        now = monotonic()
        self.wait_began = now
        head = self.head
        head[MARKED_AT] = now
        head[WAITS_FOR] = whom

    def end_wait(self) -> None:
        """See StepClock."""
        waited = self.waited()
        self.totals[Phase.EXCHANGE] += waited
        self.last += waited  # so that the phase under way does not have it

    def waited(self) -> float:
        """Ends a wait: the seconds since it began."""
        now = monotonic()
        head = self.head
        head[MARKED_AT] = now
        head[WAITS_FOR] = Neighbours.NOBODY
        return now - self.wait_began

    def follow(self, marks: Marks) -> None:
        """From now on marks and ends of steps and waits go to ``marks``, which writes this clock's totals and ring."""
        self.mark, self.end_step, self.end_wait = marks.mark, marks.end_step, marks.end_wait  # type: ignore[method-assign]

    def publish(self) -> None:
        """Leaves the totals in the ring as a step's row: first the row, then the count that makes it valid."""
        slot = self.slot
        PACK_ROW(slot.ring, self.published % slot.rows * ROW * 8, *self.totals)
        self.published += 1
        self.head[STEPS] = self.published

    def take(self) -> dict[str, float]:
        """Seconds by phase name since the last call."""
        now = self.totals.copy()
        seconds = {phase.name.lower(): now[phase] - self.taken[phase] for phase in Phase}
        self.taken = now
        return seconds

    # For loops that are not ours.

    def phase(self, name: str) -> Scope:
        """``with clock.phase("data"): ...``: the time inside is that phase's.

        Args:
            name: data, to_device, forward, backward, exchange, optimizer, callbacks or checkpoint.
        """
        return self.scopes[name]

    def arrived(self) -> None:
        """This rank's last gradient is ready; call it right before the exchange. Ends the backward pass."""
        self.mark(Phase.BACKWARD)

    def left(self) -> None:
        """The averaged gradients are there; call it right after the exchange."""
        self.mark(Phase.EXCHANGE)

    # Garbage collection

    def watch_gc(self) -> None:
        """From now on collections of this process are timed."""
        if not self.watches_gc:
            gc.callbacks.append(self.on_gc)
            self.watches_gc = True

    def unwatch_gc(self) -> None:
        """Ends ``watch_gc``."""
        if self.watches_gc:
            gc.callbacks.remove(self.on_gc)
            self.watches_gc = False

    def on_gc(self, event: str, info: dict[str, int]) -> None:
        """Called by the collector."""
        if event == "start":
            self.gc_began = monotonic()
        else:
            self.totals[GC] += monotonic() - self.gc_began


class Scope:
    """What ``RingClock.phase`` gives; made once, so that a step makes no garbage."""

    def __init__(self, clock: RingClock, phase: Phase) -> None:
        self.clock = clock
        self.column = phase

    def __enter__(self) -> None:
        self.clock.mark(REST)

    def __exit__(self, *error: object) -> None:
        self.clock.mark(self.column)
