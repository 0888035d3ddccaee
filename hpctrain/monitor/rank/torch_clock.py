"""The phase clock of a rank whose work runs on a GPU: CUDA events on its stream, polled later, never waited for.

The host only queues work, so its own time stamps say little. An event recorded where a phase ends fires when the device
has come so far; a device that idles because the host reads data or collects garbage shows that as the phase's length.
"""

from __future__ import annotations

from collections import deque
from time import monotonic

import torch

from hpctrain.monitor.rank.clock import RingClock
from hpctrain.monitor.shared import MARKED_AT, MARKED_PHASE, NO_PHASE
from hpctrain.monitor.window import ENDED, REST, WORK

LONGEST_QUEUE = 4096
"""Marks that may await the device. A device further behind than that has its oldest marks dropped."""


class CudaMarks:
    """Takes the marks of a clock and enters them when the device has reached them.

    Args:
        clock: whose totals and ring are written.
    """

    def __init__(self, clock: RingClock) -> None:
        self.clock = clock
        self.free: list[torch.cuda.Event] = []
        self.waiting: deque[tuple[int, torch.cuda.Event, float]] = deque()
        """Phase, its end, and the step's work if the step ends with it (else -1)."""
        self.last = self.record()

    def record(self) -> torch.cuda.Event:
        """An event at this point of the current stream; events are used again."""
        event = self.free.pop() if self.free else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def mark(self, phase: int) -> None:
        self.waiting.append((phase, self.record(), -1.0))
        head = self.clock.head
        head[MARKED_AT] = monotonic()
        head[MARKED_PHASE] = phase

    def end_step(self, work: float = 1.0) -> None:
        """Enters what the device has finished; a step's row may come some steps late."""
        clock = self.clock
        self.waiting.append((REST, self.record(), work))
        clock.head[MARKED_AT] = monotonic()
        clock.head[MARKED_PHASE] = NO_PHASE
        self.enter()

    def enter(self) -> None:
        """Adds finished phases to the totals, and finished steps to the ring."""
        waiting, totals = self.waiting, self.clock.totals
        while waiting and (waiting[0][1].query() or len(waiting) > LONGEST_QUEUE):
            phase, event, work = waiting.popleft()
            if event.query():
                totals[phase] += self.last.elapsed_time(event) / 1000
            self.free.append(self.last)
            self.last = event
            if work >= 0:
                totals[WORK] += work
                totals[ENDED] = monotonic()
                self.clock.publish()


def follow_cuda(clock: RingClock) -> None:
    """From now on the clock's marks are those of the current CUDA stream."""
    clock.follow(CudaMarks(clock))
