"""What wants to know of a run's progress, such as a console or TensorBoard, and an event's numbers for it."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from hpctrain.run.events import CheckpointSaved, Eval, Event, Train
from hpctrain.system.json_shape import is_number


class Sink(Protocol):
    """Lives on rank 0 only. Gets the events of the run as they happen; docs/events.md explains their fields."""

    def event(self, event: Event) -> None:
        """One event, such as ``Train`` or ``Eval`` of ``hpctrain.run.events``.

        Does not raise for reasons outside the program: no run ends for it.
        """

    def close(self) -> None:
        """The attempt is over, well or not."""


@runtime_checkable
class SlowToClose(Protocol):
    """A sink whose ``close`` waits for others, such as a server."""

    def begin_close(self) -> None:
        """Begins what ``close`` waits for, and returns; called on all sinks before any is closed."""


def scalars(event: Event) -> dict[str, float]:
    """Such as ``train/loss``, ``phase/forward`` (seconds a step), ``validation/accuracy``, ``checkpoint/stall_s``."""
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
