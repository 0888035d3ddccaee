"""Time that does not count: the whole run, or its observer, was stopped from outside (a suspended job, Ctrl-Z)."""

from __future__ import annotations

from collections import deque

REMEMBERED = 64
"""Spans; older ones are long past by the time that there are this many."""


class Suspensions:
    """Spans of the observer's clock in which the run could not move, or was not seen to."""

    def __init__(self) -> None:
        self.spans: deque[tuple[float, float]] = deque(maxlen=REMEMBERED)
        """Begin and end, in order and apart from each other."""

    def add(self, begin: float, end: float) -> None:
        """Adds a span, joined with those that it touches."""
        while self.spans and begin <= self.spans[-1][1]:
            earlier = self.spans.pop()
            begin, end = min(begin, earlier[0]), max(end, earlier[1])
        self.spans.append((begin, end))

    def running(self, since: float, until: float) -> float:
        """Seconds between two moments in which the run could move."""
        stopped = sum(max(0.0, min(end, until) - max(begin, since)) for begin, end in self.spans)
        return max(0.0, until - since - stopped)
