"""The phase clock of one rank: a few timestamps per step, written to shared memory. Never waits, makes no garbage."""

from __future__ import annotations

import gc
import struct
from time import monotonic
from typing import Protocol

from hpctrain.monitor.shared import (
    GPU_PLACE,
    MARKED_AT,
    MARKED_PHASE,
    NO_PHASE,
    PEAK_BYTES,
    RESERVED_BYTES,
    ROW,
    STEPS,
    WAITS_FOR,
    Slot,
    own_slot,
    place_of,
)
from hpctrain.monitor.window import ENDED, GC, REST, WORK
from hpctrain.train.clock import Neighbours, Phase, past

PACK_ROW = struct.Struct(f"{ROW}d").pack_into


class Marks(Protocol):
    """Replacement for a RingClock's marks; see StepClock."""

    def mark(self, phase: int) -> None:
        """Counts the time since the last mark as this phase's."""

    def mark_ahead(self, phase: int) -> None:
        """See StepClock."""

    def end_step(self, work: float = 1.0) -> None:
        """Ends a step."""

    def begin_wait(self, whom: Neighbours) -> None:
        """Begins a wait for other ranks."""

    def end_wait(self) -> None:
        """Ends it."""


MARKS = ("mark", "mark_ahead", "end_step", "begin_wait", "end_wait")
"""The methods of Marks."""


class RingClock:
    """A StepClock that the node's agent can read.

    Keeps running totals of the seconds in each phase and writes them as a row of the ring at the end of each step;
    differences between rows are the times of steps. Custom loops use ``phase``, ``arrived``, ``left``, ``end_step``.

    Args:
        slot: this rank's slot in the node's shared memory; private memory by default.
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
        """See StepClock. Takes about a third of a microsecond."""
        now = monotonic()
        self.totals[phase] += now - self.last
        self.last = now
        head = self.head
        head[MARKED_AT] = now
        head[MARKED_PHASE] = phase

    def mark_ahead(self, phase: int) -> None:
        """Does nothing: the times are the host's."""

    def mark_past(self, phase: int, ago_s: float) -> None:
        """See StepClock."""
        ended = past(monotonic(), ago_s, self.last)
        self.totals[phase] += ended - self.last
        self.last = ended

    def end_step(self, work: float = 1.0) -> None:
        """Ends a step. Time since the last mark counts as REST.

        Args:
            work: amount of work of this rank's step, such as samples: a rank with more of it is loaded, not slow.
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
        self.waits_for(whom)

    def waits_for(self, whom: Neighbours) -> None:
        """Begins a wait; ``waited`` ends it."""
        now = monotonic()
        self.wait_began = now
        head = self.head
        head[MARKED_AT] = now
        head[WAITS_FOR] = whom

    def end_wait(self) -> None:
        """See StepClock."""
        waited = self.waited()
        self.totals[Phase.EXCHANGE] += waited
        self.last += waited  # so that the current phase does not count it

    def waited(self) -> float:
        """Ends a wait and returns its seconds."""
        now = monotonic()
        head = self.head
        head[MARKED_AT] = now
        head[WAITS_FOR] = Neighbours.NOBODY
        return now - self.wait_began

    def follow(self, marks: Marks) -> None:
        """Delegates what ``marks`` has to it; it writes this clock's totals."""
        for name in MARKS:
            setattr(self, name, getattr(marks, name))

    def beat(self, phase: float) -> None:
        """Shows the agent that this rank is alive, and the phase that has ended; for Marks."""
        self.head[MARKED_AT] = monotonic()
        self.head[MARKED_PHASE] = phase

    def add(self, phase: int, seconds: float, waited_s: float) -> None:
        """Adds the time of a phase, and of waits for other ranks in it; for Marks."""
        self.totals[phase] += seconds - waited_s
        self.totals[Phase.EXCHANGE] += waited_s

    def end_row(self, work: float) -> None:
        """Ends the row of a step whose phases have been added; for Marks."""
        self.totals[WORK] += work
        self.totals[ENDED] = monotonic()
        self.publish()

    def on_gpu(self, pci: str) -> None:
        """Says on which GPU this rank is."""
        self.head[GPU_PLACE] = place_of(pci)

    def device_memory(self, peak_bytes: float, reserved_bytes: float) -> None:
        """Says how much of the GPU's memory tensors used at most, and PyTorch holds."""
        self.head[PEAK_BYTES] = peak_bytes
        self.head[RESERVED_BYTES] = reserved_bytes

    def publish(self) -> None:
        """Writes the totals to the ring as a step's row, then the count that makes the row valid."""
        slot = self.slot
        PACK_ROW(slot.ring, self.published % slot.rows * ROW * 8, *self.totals)
        self.published += 1
        self.head[STEPS] = self.published

    def take(self) -> dict[str, float]:
        """Returns the seconds by phase name since the last call."""
        now = self.totals.copy()
        seconds = {phase.name.lower(): now[phase] - self.taken[phase] for phase in Phase}
        self.taken = now
        return seconds

    # For custom loops.

    def phase(self, name: str) -> Scope:
        """Context manager that times a phase: ``with clock.phase("data"): ...``.

        Args:
            name: data, to_device, forward, backward, exchange, optimizer, callbacks or checkpoint.
        """
        return self.scopes[name]

    def arrived(self) -> None:
        """Marks the end of the backward pass; call it right before the exchange."""
        self.mark(Phase.BACKWARD)

    def left(self) -> None:
        """Marks the end of the exchange; call it right after the averaged gradients have arrived."""
        self.mark(Phase.EXCHANGE)

    # Garbage collection

    def watch_gc(self) -> None:
        """Starts to time this process's garbage collections."""
        if not self.watches_gc:
            gc.callbacks.append(self.on_gc)
            self.watches_gc = True

    def unwatch_gc(self) -> None:
        """Ends ``watch_gc``."""
        if self.watches_gc:
            gc.callbacks.remove(self.on_gc)
            self.watches_gc = False

    def on_gc(self, event: str, info: dict[str, int]) -> None:
        """Callback of the garbage collector."""
        if event == "start":
            self.gc_began = monotonic()
        else:
            self.totals[GC] += monotonic() - self.gc_began


class Scope:
    """Context manager of ``RingClock.phase``; made once, so that steps allocate nothing."""

    def __init__(self, clock: RingClock, phase: Phase) -> None:
        self.clock = clock
        self.column = phase

    def __enter__(self) -> None:
        self.clock.mark(REST)

    def __exit__(self, *error: object) -> None:
        self.clock.mark(self.column)
