"""Everything that a report needs from a run folder; memory grows with the count of numbers, not with the text."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar, get_args

import numpy as np

from hpctrain.run.events import Eval, Event, TakeOver, Train, is_repeated
from hpctrain.run.run_status import RunSnapshot
from hpctrain.system.array_types import Floats

KEPT_EVENTS = 2000
"""Maximum number of rare events (checkpoints, stragglers, ...) kept per kind; of more, the middle ones are dropped."""

Kind = TypeVar("Kind", bound=Event)


@dataclass(frozen=True)
class Series:
    """One curve: float64 arrays of equal length, sorted by time."""

    step: Floats
    time: Floats
    """Unix seconds."""
    value: Floats


@dataclass(frozen=True)
class RunHistory:
    """A run and the curves of its events; steps that a later attempt computed again count once."""

    run: RunSnapshot
    train: Mapping[str, Series]
    """Curves by name: loss, lr, samples_per_s, and every other number in ``train`` events."""
    phases: Mapping[str, Series]
    """Seconds of each phase per interval."""
    metrics: Mapping[str, Series]
    """Validation metrics by name."""
    rare: tuple[Event, ...]
    """All other events, by time."""
    counts: Mapping[str, int]
    """Number of events by name, including repeated ones."""

    def all(self, kind: type[Kind]) -> list[Kind]:
        """Returns the rare events of a kind, by time."""
        return [event for event in self.rare if isinstance(event, kind)]

    def last(self, kind: type[Kind]) -> Kind | None:
        """Returns the last rare event of a kind."""
        return next((event for event in reversed(self.rare) if isinstance(event, kind)), None)

    @property
    def curves(self) -> list[Series]:
        """The curves of training values and validation metrics."""
        return [*self.train.values(), *self.metrics.values()]


MARKS = tuple(f'"{kind.NAME}"'.encode() for kind in get_args(TakeOver))
"""Bytes that occur in every line with a TakeOver event."""


class EventColumns:
    """Collects the events of a run as columns of numbers.

    Args:
        starts: step at which each attempt took over; see ``takeovers``.
    """

    def __init__(self, starts: Mapping[int, int]) -> None:
        self.starts = starts
        self.train: dict[str, array[float]] = defaultdict(lambda: array("d"))
        self.phases: dict[str, array[float]] = defaultdict(lambda: array("d"))
        self.metrics: dict[str, array[float]] = defaultdict(lambda: array("d"))
        self.rare: dict[str, list[Event]] = defaultdict(list)
        self.counts: dict[str, int] = defaultdict(int)

    def add(self, event: Event) -> None:
        """Counts an event, and stores it unless a later attempt computed its step again."""
        self.counts[event.name] += 1
        if is_repeated(event, self.starts):
            return
        if isinstance(event, Train):
            self._numbers(self.train, event, event.numbers())
            self._numbers(self.phases, event, event.seconds)
        elif isinstance(event, Eval):
            self._numbers(self.metrics, event, event.metrics)
        else:
            kept = self.rare[event.name]
            kept.append(event)
            if len(kept) > KEPT_EVENTS:
                del kept[KEPT_EVENTS // 2]

    def history(self, run: RunSnapshot) -> RunHistory:
        """Returns what was collected, for this run."""
        rare = sorted((event for events in self.rare.values() for event in events), key=lambda event: event.time)
        train, phases, metrics = map(self.series, (self.train, self.phases, self.metrics))
        return RunHistory(run, train, phases, metrics, tuple(rare), dict(self.counts))

    def series(self, columns: Mapping[str, array[float]]) -> dict[str, Series]:
        """Converts columns to curves, sorted by time."""
        curves = {}
        for name, numbers in columns.items():
            rows = np.frombuffer(numbers, dtype=np.float64).reshape(-1, 3)
            rows = rows[np.argsort(rows[:, 1], kind="stable")]
            curves[name] = Series(rows[:, 0], rows[:, 1], rows[:, 2])
        return curves

    @staticmethod
    def _numbers(columns: dict[str, array[float]], event: Event, values: Mapping[str, float | None]) -> None:
        for name, value in values.items():
            if value is not None:
                columns[name].extend((event.step, event.time, value))
