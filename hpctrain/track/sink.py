"""The protocol of sinks, which receive a run's events (console, TensorBoard, ...), and an event's numbers for them."""

from __future__ import annotations

from typing import Protocol

from hpctrain.run.events import CheckpointSaved, Eval, Event, Train
from hpctrain.system.json_shape import is_number


class Sink(Protocol):
    """Receives the run's events as they happen, on rank 0; docs/events.md explains their fields."""

    def event(self, event: Event) -> None:
        """Receives one event, such as ``Train`` or ``Eval`` of ``hpctrain.run.events``.

        Must not raise for external reasons: a sink must never end a run.
        """

    def close(self) -> None:
        """Called at the end of the attempt, successful or not, in a separate thread: it may wait for a server."""


def scalars(event: Event) -> dict[str, float]:
    """An event's numbers: ``train/loss``, ``phase/forward`` (seconds per step), ``validation/accuracy``, ..."""
    found: dict[str, float | None] = {}
    if isinstance(event, Train):
        found |= {f"train/{name}": value for name, value in event.numbers().items()}
        found |= {f"phase/{name}": value for name, value in event.seconds_per_step().items()}
    elif isinstance(event, Eval):
        found |= {f"validation/{name}": value for name, value in event.metrics.items()}
    elif isinstance(event, CheckpointSaved):
        found |= {"checkpoint/stall_s": event.stall_s, "checkpoint/write_s": event.write_s}
        found |= {"checkpoint/bytes": event.bytes}
    return {name: float(value) for name, value in found.items() if value is not None and is_number(value)}
