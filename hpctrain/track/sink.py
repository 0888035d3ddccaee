"""What wants to know of a run's progress: a console, TensorBoard, MLflow, Prometheus."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Sink(Protocol):
    """Lives on rank 0 only. Gets the events of the run as they happen; see docs/events.md for their fields."""

    def event(self, event: Mapping[str, Any]) -> None:
        """One event, with its common fields. Does not raise for reasons outside the program: no run ends for it."""

    def close(self) -> None:
        """The attempt is over, well or not."""
