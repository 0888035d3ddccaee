"""The events of a run: their schema, their lines in a file, and what remains of them after resumes. No I/O here."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from hpctrain.system.json_shape import Shape, is_count, is_time, misfit
from hpctrain.system.safe_read import parse_json

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

NUMBER = (float, None)
"""Numbers that JSON does not know are null."""
TEXT = (str, None)
COUNT = (is_count, None)
ABOUT_RANK = {"rank": COUNT, "host": TEXT, "steps": COUNT, "state": TEXT, "doing": TEXT, "stack": TEXT}

TYPES: Mapping[str, Mapping[str, Shape]] = {
    "run_started": {
        "ranks": is_count,
        "hosts": [str],
        "framework": TEXT,
        "reducer": TEXT,
        "reducer_variant": TEXT,
        "gradient_bytes": COUNT,
        "versions": {str: TEXT},
        "total_steps": COUNT,
    },
    "train": {
        "loss": NUMBER,
        "lr": NUMBER,
        "samples_per_s": NUMBER,
        "seconds": {str: NUMBER},
        "steps": is_count,
        "epoch": COUNT,
        "total_steps": COUNT,
        "grad_norm": NUMBER,
    },
    "eval": {"metrics": {str: NUMBER}, "epoch": COUNT},
    "run_finished": {"reason": str, "steps": is_count, "seconds": float},
    "stop_requested": {"by": TEXT, "code": TEXT},
    "checkpoint_saved": {"path": str, "bytes": is_count, "stall_s": float, "write_s": float},
    "checkpoint_failed": {"path": TEXT, "error": TEXT},
    "resumed": {"path": TEXT, "ranks": COUNT, "rejected": ([{"step": COUNT, "reason": TEXT}], None)},
    "initial_weights": {
        "path": TEXT,
        "taken": [str],
        "missing": [str],
        "unexpected": [str],
        "reshaped": [str],
    },
    "straggler": {
        "kind": TEXT,
        "rank": COUNT,
        "ranks": [is_count],
        "host": TEXT,
        "cause": TEXT,
        "slowdown": NUMBER,
        "cost": NUMBER,
        "state": TEXT,
        "evidence": [str],
        "window": COUNT,
        "sentence": TEXT,
        "excluded": bool,
    },
    "hang": {
        "kind": TEXT,
        "silence_s": NUMBER,
        "ranks": [ABOUT_RANK],
        "healthy": [ABOUT_RANK],
        "waiting": COUNT,
        "action": TEXT,
        "sentence": TEXT,
    },
}
"""What readers take for granted of fields that are there, by event; an event with another value is left out."""

REPEATED = ("train", "eval")
"""Events of steps that count once, however often the steps were computed."""


def encode(event: Mapping[str, Any]) -> bytes:
    """One line of strict JSON. Numbers that JSON does not know (NaN, infinity) become null."""
    return json.dumps(_finite(event), allow_nan=False, separators=(", ", ": ")).encode() + b"\n"


class Decoder:
    """Lines of a file to events, in its order.

    Torn lines, which a crash or a full disk leaves, are dropped. Events with a field that is not of its type are left
    out and counted: somebody else has written them.
    """

    def __init__(self) -> None:
        self.left_out = 0
        self.first = ""
        """What was wrong with the first of them."""

    def events(self, lines: Iterable[bytes]) -> Iterator[Event]:
        """The events in these lines."""
        for line in lines:
            try:
                event = parse_json(line)
            except ValueError:
                continue
            if not isinstance(event, dict) or not all(key in event for key in COMMON):
                continue
            if wrong := _wrong_field(event):
                self.left_out += 1
                self.first = self.first or wrong
                continue
            yield event

    @property
    def note(self) -> str:
        """A sentence for people; empty where nothing was left out."""
        if not self.left_out:
            return ""
        several = f"{self.left_out} events are" if self.left_out > 1 else "an event is"
        return f"{several} left out, for {self.first} is not of the type that docs/events.md gives it"


def decode(content: bytes) -> list[Event]:
    """The events in a file's content, as ``Decoder`` reads them."""
    return list(Decoder().events(content.split(b"\n")))


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


_WRONG_COMMON = misfit({"time": is_time, "event": str, "step": is_count, "attempt": is_count})
_WRONG = {name: misfit(dict(types)) for name, types in TYPES.items()}


def _wrong_field(event: Event) -> str | None:
    """The first field that is not of its type, and whose; None where all are."""
    if wrong := _WRONG_COMMON(event):
        return wrong
    name = event["event"]
    return f"{wrong} of {name}" if name in _WRONG and (wrong := _WRONG[name](event)) else None


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
