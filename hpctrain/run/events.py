"""The events of a run: their schema, their lines in a file, and what remains of them after resumes. No I/O here."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Event = dict[str, Any]

COMMON = ("time", "event", "step", "attempt")
"""Fields of every event: Unix seconds, name, updates done, attempt (1 for the first)."""

FIELDS: Mapping[str, tuple[str, ...]] = {
    "run_started": ("ranks", "hosts", "framework", "reducer", "versions"),
    "train": ("loss", "lr", "samples_per_s", "seconds"),
    "eval": ("metrics",),
    "checkpoint_saved": ("path", "bytes", "stall_s", "write_s"),
    "checkpoint_failed": ("path", "error"),
    "resumed": ("path", "ranks", "rejected"),
    "initial_weights": ("path", "taken", "missing", "unexpected", "reshaped"),
    "stop_requested": ("by",),
    "straggler": ("rank", "host", "cause", "slowdown", "cost", "state"),
    "hang": (),
    "run_finished": ("reason", "steps", "seconds"),
}
"""Fields that an event of each name has beside the common ones; docs/events.md explains them. More may be there."""

REPEATED = ("train", "eval")
"""Events of steps that count once, however often the steps were computed."""


def encode(event: Mapping[str, Any]) -> bytes:
    """One line of strict JSON. Numbers that JSON does not know (NaN, infinity) become null."""
    return json.dumps(_finite(event), allow_nan=False, separators=(", ", ": ")).encode() + b"\n"


def decode(content: bytes) -> list[Event]:
    """The events in a file's content, in its order. Torn lines, which a crash or a full disk leaves, are dropped."""
    events = []
    for line in content.split(b"\n"):
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and all(key in event for key in COMMON):
            events.append(event)
    return events


def resolve(events: Iterable[Event]) -> list[Event]:
    """Events by time, without training and evaluation of steps that a later attempt computed again.

    An attempt says where it takes over: the step of its ``run_started`` or ``resumed``. What earlier attempts
    reported beyond that step is not part of the run's history.
    """
    ordered = sorted(events, key=lambda event: event["time"])
    starts = _first_steps(ordered)
    return [event for event in ordered if not _repeated(event, starts)]


def missing_fields(event: Event) -> list[str]:
    """Fields that the schema wants and the event lacks; of a name that it does not know, it wants the common ones."""
    return [key for key in (*COMMON, *FIELDS.get(event.get("event", ""), ())) if key not in event]


def _first_steps(ordered: Sequence[Event]) -> dict[int, int]:
    return {event["attempt"]: event["step"] for event in ordered if event["event"] in ("run_started", "resumed")}


def _repeated(event: Event, starts: Mapping[int, int]) -> bool:
    if event["event"] not in REPEATED:
        return False
    return any(attempt > event["attempt"] and event["step"] > start for attempt, start in starts.items())


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
