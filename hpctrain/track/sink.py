"""What wants to know of a run's progress: a console, TensorBoard, MLflow, Prometheus."""

from __future__ import annotations

from typing import Protocol

from hpctrain.run.events import Event


class Sink(Protocol):
    """Lives on rank 0 only. Gets the events of the run as they happen; docs/events.md explains their fields."""

    def event(self, event: Event) -> None:
        """One event, such as ``Train`` or ``Eval`` of ``hpctrain.run.events``.

        Does not raise for reasons outside the program: no run ends for it.
        """

    def close(self) -> None:
        """The attempt is over, well or not."""
