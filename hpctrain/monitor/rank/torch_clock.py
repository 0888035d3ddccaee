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
from hpctrain.train.clock import Phase

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
        self.waiting: deque[tuple[int, torch.cuda.Event, float, float]] = deque()
        """Phase, its end, the step's work if the step ends with it (else -1), and seconds of it that were waited."""
        self.waited_s = 0.0
        self.last = self.record()

    def record(self) -> torch.cuda.Event:
        """An event at this point of the current stream; events are used again."""
        event = self.free.pop() if self.free else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def mark(self, phase: int) -> None:
        self.append(phase, -1.0)
        head = self.clock.head
        head[MARKED_AT] = monotonic()
        head[MARKED_PHASE] = phase

    def end_step(self, work: float = 1.0) -> None:
        """Enters what the device has finished; a step's row may come some steps late."""
        clock = self.clock
        self.append(REST, work)
        clock.head[MARKED_AT] = monotonic()
        clock.head[MARKED_PHASE] = NO_PHASE
        self.enter()

    def end_wait(self) -> None:
        """The device had nothing to do: what it was to send had been copied to the host before."""
        self.waited_s += self.clock.waited()

    def append(self, phase: int, work: float) -> None:
        """Enters a mark into the queue."""
        self.waiting.append((phase, self.record(), work, self.waited_s))
        self.waited_s = 0.0

    def enter(self) -> None:
        """Adds finished phases to the totals, and finished steps to the ring."""
        waiting, totals = self.waiting, self.clock.totals
        while waiting and (waiting[0][1].query() or len(waiting) > LONGEST_QUEUE):
            phase, event, work, waited = waiting.popleft()
            if event.query():
                seconds = self.last.elapsed_time(event) / 1000
                waited = min(waited, seconds)  # a stage may wait on the host while its device still works
                totals[phase] += seconds - waited
                totals[Phase.EXCHANGE] += waited
            self.free.append(self.last)
            self.last = event
            if work >= 0:
                totals[WORK] += work
                totals[ENDED] = monotonic()
                self.clock.publish()


def follow_cuda(clock: RingClock) -> None:
    """From now on the clock's marks are those of the current CUDA stream."""
    clock.follow(CudaMarks(clock))
