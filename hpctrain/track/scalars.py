"""The numbers of an event under the names that trackers show them by."""

from __future__ import annotations

from hpctrain.run.events import CheckpointSaved, Eval, Event, Train
from hpctrain.system.json_shape import is_number


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
