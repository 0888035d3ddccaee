"""A metric that is interrupted in the midst of an evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Interruption(BaseException):
    """As a signal would raise."""


updates: list[int] = []
"""How many updates are left, if there is to be an interruption."""


@contextmanager
def at_update(number: int) -> Iterator[None]:
    """Interrupts in the body after so many updates."""
    updates.append(number)
    try:
        yield
    finally:
        updates.clear()


class Interrupting:
    """Another metric, until the interruption."""

    def __init__(self, metric: Any) -> None:
        self.init, self.merge, self.compute = metric.init, metric.merge, metric.compute
        self.metric = metric

    def update(self, state: Any, *arrays: Any) -> Any:
        if updates:
            updates[0] -= 1
            if not updates[0]:
                raise Interruption
        return self.metric.update(state, *arrays)
