"""A metric that is interrupted in the middle of an evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Interruption(BaseException):
    """The interruption, not an Exception, like one raised by a signal handler."""


updates: list[int] = []
"""Number of updates until the interruption; empty if there is to be none."""


@contextmanager
def at_update(number: int) -> Iterator[None]:
    """Interrupt the metric's update with this number (from 1) inside the context."""
    updates.append(number)
    try:
        yield
    finally:
        updates.clear()


class Interrupting:
    """Wraps another metric and interrupts one of its updates."""

    def __init__(self, metric: Any) -> None:
        self.init, self.merge, self.compute = metric.init, metric.merge, metric.compute
        self.metric = metric

    def update(self, state: Any, *arrays: Any) -> Any:
        if updates:
            updates[0] -= 1
            if not updates[0]:
                raise Interruption
        return self.metric.update(state, *arrays)
