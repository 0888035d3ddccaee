"""The events of a run: their types, their encoding as lines of JSON, and which ones count after a resume. No I/O."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, dataclass_transform

from hpctrain.run.rank_environment import current_attempt
from hpctrain.system.json_shape import Reads, fields_of, finite, is_number, is_time, sound
from hpctrain.system.quantities import number
from hpctrain.system.safe_read import parse_json

SCHEMA = 1
"""Version of the schema, written with every event. Readers accept any version and use the fields they know."""
CUT_OFF = "cut off"
"""Value of ``Hang.kind`` for a host that cannot be reached."""


class SteadyClock:
    """Unix seconds that never decrease, even if this host's clock is set back: events are ordered by their times."""

    last = ahead = 0.0

    def __call__(self) -> float:
        found = time.time()
        self.ahead = max(self.ahead, self.last - found)
        self.last = found + self.ahead
        return self.last


wall_clock = SteadyClock()


@dataclass_transform(kw_only_default=True, frozen_default=True)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened in a run; docs/events.md explains each kind and its fields.

    Unknown values are None, and null in the file. By default ``time`` is now and ``attempt`` this process's attempt.
    """

    NAME: ClassVar[str]
    """Value of the field ``event`` in the file."""

    time: float = dataclasses.field(default_factory=wall_clock)
    """Unix seconds."""
    step: int
    """Number of updates done."""
    attempt: int = dataclasses.field(default_factory=current_attempt)
    """Number of the attempt, from 1."""
    more: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Other fields: a task's own metrics, or fields of a newer version."""

    def __init_subclass__(cls, name: str) -> None:
        cls.NAME = name
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)

    @property
    def name(self) -> str:
        """The name in the file's field ``event``."""
        return self.NAME

    def to_json(self) -> dict[str, Any]:
        """Returns all fields by their names in the file, those of ``more`` last."""
        head = {"time": self.time, "event": self.name, "step": self.step, "attempt": self.attempt, "schema": SCHEMA}
        own = {name: _plain(getattr(self, name)) for name in _FIELDS[type(self)] if name not in head}
        return {**head, **own, **{name: value for name, value in self.more.items() if name not in head | own}}


class OtherEvent(Event, name=""):
    """An event whose kind this version does not know."""

    called: str

    @property
    def name(self) -> str:
        """The name in the file's field ``event``."""
        return self.called


class RunStarted(Event, name="run_started"):
    """An attempt has begun to train."""

    ranks: int | None = None
    hosts: tuple[str, ...] = ()
    tensor: int | None = None
    pipeline: int | None = None
    layers: tuple[int, ...] = ()
    framework: str | None = None
    reducer: str | None = None
    reducer_variant: str | None = None
    gradient_bytes: int | None = None
    through_host_s: float | None = None
    flops_per_sample: float | None = None
    peak_flops_per_s: float | None = None
    sheet_flops_per_s: float | None = None
    versions: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    total_steps: int | None = None


class Train(Event, name="train"):
    """Means over an interval of updates."""

    MEASURED: ClassVar = ("loss", "lr", "samples_per_s", "tokens_per_s", "learning_rate", "grad_norm", "mfu")
    """Fields with curves, besides the task's own metrics."""

    loss: float | None = None
    lr: float | None = None
    """Factor on the optimizer's learning rate; ``learning_rate`` is the rate itself."""
    learning_rate: float | None = None
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    seconds: Mapping[str, float | None] = dataclasses.field(default_factory=dict)
    steps: int | None = None
    epoch: int | None = None
    total_steps: int | None = None
    grad_norm: float | None = None
    mfu: float | None = None

    def rate(self) -> str:
        """Samples per second, and tokens per second if they are known, for people."""
        tokens = f"  {number(self.tokens_per_s)} tokens/s" if self.tokens_per_s else ""
        return f"{number(self.samples_per_s)} samples/s{tokens}"

    def numbers(self) -> dict[str, float]:
        """Returns the measured numbers by name, including a task's own metrics."""
        named = {name: getattr(self, name) for name in self.MEASURED}
        return {name: value for name, value in {**self.more, **named}.items() if is_number(value)}

    def seconds_per_step(self) -> dict[str, float]:
        """Returns the mean seconds per step by phase."""
        return {phase: spent / max(self.steps or 1, 1) for phase, spent in self.seconds.items() if spent is not None}


class Eval(Event, name="eval"):
    """An evaluation over the validation data."""

    metrics: Mapping[str, float | None] = dataclasses.field(default_factory=dict)
    epoch: int | None = None


class RunFinished(Event, name="run_finished"):
    """An attempt has ended by itself or on request."""

    reason: str | None = None
    steps: int | None = None
    seconds: float | None = None


class StopRequested(Event, name="stop_requested"):
    """The ranks have agreed to stop."""

    by: str | None = None
    code: str | None = None
    """Value of an hpctrain.errors.Code."""


class CheckpointSaved(Event, name="checkpoint_saved"):
    """A checkpoint was committed."""

    path: str | None = None
    bytes: int | None = None
    stall_s: float | None = None
    write_s: float | None = None


class SnapshotSaved(Event, name="snapshot_saved"):
    """A snapshot was completed in the nodes' memory or scratch; a newer one will replace it."""

    tier: str | None = None
    bytes: int | None = None
    stall_s: float | None = None
    write_s: float | None = None


class CheckpointStored(Event, name="checkpoint_stored"):
    """A checkpoint was copied to the object store."""

    path: str | None = None
    bytes: int | None = None
    write_s: float | None = None


class StoreAway(Event, name="store_away"):
    """Checkpoints do not reach the object store. Training continues; the newest is sent once the store answers."""

    path: str | None = None
    error: str | None = None


class CheckpointFailed(Event, name="checkpoint_failed"):
    """A checkpoint could not be written."""

    path: str | None = None
    error: str | None = None
    failures: int | None = None
    """Consecutive failed saves, including this one."""


@dataclasses.dataclass(frozen=True)
class Rejected:
    """A checkpoint that was not used."""

    step: int | None = None
    reason: str | None = None


class Resumed(Event, name="resumed"):
    """An attempt has resumed from a checkpoint."""

    path: str | None = None
    tier: str | None = None
    """memory, scratch or store; None for the run folder."""
    ranks: int | None = None
    rejected: tuple[Rejected, ...] = ()


class InitialWeights(Event, name="initial_weights"):
    """A new run began with initial weights from a file."""

    path: str | None = None
    taken: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    reshaped: tuple[str, ...] = ()


class Straggler(Event, name="straggler"):
    """The monitor confirmed a finding, or it is over."""

    kind: str | None = None
    rank: int | None = None
    ranks: tuple[int, ...] = ()
    host: str | None = None
    cause: str | None = None
    slowdown: float | None = None
    cost: float | None = None
    state: str | None = None
    evidence: tuple[str, ...] = ()
    window: int | None = None
    sentence: str | None = None
    excluded: bool | None = None

    @property
    def about(self) -> tuple[object, ...]:
        """Key under which a finding replaces an earlier one; it includes the ranks if several may be slow at a time."""
        return (self.kind, *self.ranks) if self.kind in ("rank", "pauses", "host") else (self.kind,)

    @property
    def text(self) -> str:
        """A sentence for people."""
        return self.sentence or f"rank {self.rank} on {self.host}: {self.cause}"


@dataclasses.dataclass(frozen=True)
class AboutRank:
    """State of one rank in a hang."""

    rank: int | None = None
    host: str | None = None
    steps: int | None = None
    state: str | None = None
    doing: str | None = None
    stack: str | None = None


class Hang(Event, name="hang"):
    """No rank has made a step for too long, a rank died without notice, or a host cannot be reached."""

    kind: str | None = None
    """``hung``, ``died``, or CUT_OFF."""
    silence_s: float | None = None
    ranks: tuple[AboutRank, ...] = ()
    healthy: tuple[AboutRank, ...] = ()
    waiting: int | None = None
    action: str | None = None
    sentence: str | None = None

    @property
    def text(self) -> str:
        """A sentence for people."""
        return self.sentence or "no rank moves"


@dataclasses.dataclass(frozen=True)
class RankDevice:
    """A rank's GPU at one time; docs/events.md explains the fields."""

    rank: int | None = None
    host: str | None = None
    peak_bytes: float | None = None
    reserved_bytes: float | None = None
    busy: float | None = None
    watts: float | None = None
    mhz: float | None = None
    most_mhz: float | None = None
    celsius: float | None = None
    slowed: tuple[str, ...] = ()


class Devices(Event, name="devices"):
    """What the attempt's hosts and GPUs have used so far."""

    cpu_joules: float | None = None
    gpu_joules: float | None = None
    ranks: tuple[RankDevice, ...] = ()


class Recovered(Event, name="recovered"):
    """The first new step after a failed attempt."""

    rank: int | None = None
    host: str | None = None
    code: str | None = None
    """Value of an hpctrain.errors.Code."""
    reason: str | None = None
    seconds: float | None = None
    repeated_steps: int | None = None

    @property
    def text(self) -> str:
        """A sentence for people."""
        again = f", {self.repeated_steps} steps done again" if self.repeated_steps else ""
        took = "" if self.seconds is None else f" after {self.seconds:.1f} s"
        return f"recovered{took}{again}: {self.reason or 'the attempt before had failed'}"


KINDS: Mapping[str, type[Event]] = {
    kind.NAME: kind
    for kind in (
        *(RunStarted, Train, Eval, RunFinished, StopRequested, CheckpointSaved, CheckpointFailed),
        *(CheckpointStored, StoreAway, SnapshotSaved, Resumed, InitialWeights, Straggler, Hang, Recovered, Devices),
    )
}
"""Event types by name."""

Repeated = Train | Eval
"""Events that count once per step, even if later attempts computed the step again."""
TakeOver = RunStarted | Resumed
"""Events that give the step at which an attempt took over."""


def encode(event: Event) -> bytes:
    """Encodes an event as one line of strict JSON. NaN and infinity, which JSON does not have, become null."""
    return json.dumps(finite(event.to_json(), None), separators=(", ", ": ")).encode() + b"\n"


class Decoder:
    """Decodes the lines of a file to events, in order.

    Drops torn lines, which a crash or a full disk leaves. Leaves out and counts events with a field of the wrong type,
    which another program must have written.
    """

    def __init__(self) -> None:
        self.left_out = 0
        self.first = ""
        """Description of the first event that was left out."""

    def events(self, lines: Iterable[bytes]) -> Iterator[Event]:
        """Yields the events in these lines."""
        for line in lines:
            try:
                found = parse_json(line)
            except ValueError:
                continue
            if not isinstance(found, dict) or not all(key in found for key in COMMON):
                continue
            event = _read(found)
            if isinstance(event, Event):
                yield event
            else:
                self.left_out += 1
                self.first = self.first or event

    @property
    def note(self) -> str:
        """A sentence for people; empty if nothing was left out."""
        if not self.left_out:
            return ""
        several = f"{self.left_out} events are" if self.left_out > 1 else "an event is"
        return f"{several} left out, for {self.first} is not of the type that docs/events.md gives it"


def decode(content: bytes) -> list[Event]:
    """Returns the events in a file's content; see ``Decoder``."""
    return list(Decoder().events(content.split(b"\n")))


def takeovers(events: Iterable[Event]) -> dict[int, int]:
    """Returns the step at which each attempt took over; steps of earlier attempts beyond it were computed again."""
    return {event.attempt: event.step for event in events if isinstance(event, TakeOver)}


def is_repeated(event: Event, starts: Mapping[int, int]) -> bool:
    """Whether a later attempt computed the event's step again; ``starts`` comes from ``takeovers``."""
    if not isinstance(event, Repeated):
        return False
    return any(attempt > event.attempt and event.step > start for attempt, start in starts.items())


def resolve(events: Iterable[Event]) -> list[Event]:
    """Sorts events by time and drops Train and Eval events of steps that a later attempt computed again."""
    ordered = sorted(events, key=lambda event: event.time)
    starts = takeovers(ordered)
    return [event for event in ordered if not is_repeated(event, starts)]


# Readers of fields, from their annotations


COMMON = ("time", "event", "step", "attempt")
"""Fields of every event."""
_FIELDS: Mapping[type[Event], Mapping[str, Reads]] = {
    kind: {name: read for name, read in fields_of(kind, time=sound(is_time)).items() if name not in ("more", "called")}
    for kind in (Event, OtherEvent, *KINDS.values())
}


def _read(found: dict[str, Any]) -> Event | str:
    """Returns the event, or a description of the field that has the wrong type."""
    if type(found["event"]) is not str:
        return "event"
    kind = KINDS.get(found["event"])
    fields, known, more = _FIELDS[kind or Event], {}, {}
    for name, value in found.items():
        if name not in fields:
            more[name] = value
        elif value is not None or name in COMMON:
            try:
                known[name] = fields[name](value)
            except ValueError:
                return f"{name} of {found['event']}"
    more.pop("schema", None)
    called = more.pop("event")
    return kind(**known, more=more) if kind else OtherEvent(**known, more=more, called=called)


def _plain(value: Any) -> Any:
    """Converts dataclasses to mappings."""
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return vars(value) if dataclasses.is_dataclass(value) else value
