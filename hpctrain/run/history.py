"""Everything a report needs of a run folder, in memory that grows with the numbers only, not with their text."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from hpctrain.config.values import read_yaml
from hpctrain.errors import UserError
from hpctrain.run import last_words
from hpctrain.run.attempts import Attempts
from hpctrain.run.events import COMMON, REPEATED, Decoder, Event
from hpctrain.run.folder import RunDir
from hpctrain.run.last_words import AttemptWords
from hpctrain.system import bounded_yaml, safe_read
from hpctrain.system.json_shape import fits, is_number

NOT_PLOTTED = (*COMMON, "steps", "epoch", "total_steps")
"""Numbers of ``train`` events that are no curves."""
KEPT_EVENTS = 2000
"""Rare events (checkpoints, stragglers, ...) of each name that are kept whole; of more, the first and the last half."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Series:
    """One curve: float64 arrays of equal length, by time."""

    step: Floats
    time: Floats
    """Unix seconds."""
    value: Floats


@dataclass(frozen=True)
class RunData:
    """A run as its folder tells it; whatever is missing there is empty here."""

    path: Path
    info: dict[str, Any]
    """run.json."""
    config: dict[str, Any]
    """run.yaml."""
    train: dict[str, Series]
    """By name: loss, lr, samples_per_s, and one for each further number of the ``train`` events."""
    phases: dict[str, Series]
    """Seconds of each phase in each interval."""
    metrics: dict[str, Series]
    """Validation metrics."""
    rare: dict[str, list[Event]]
    """All other events by name, by time."""
    counts: dict[str, int]
    """Events by name, repeated ones included."""
    words: dict[int, AttemptWords] = field(default_factory=dict)
    """Last words by attempt."""
    notes: tuple[str, ...] = ()
    """What was left out, for people: events that somebody else has written."""

    def first(self, event: str) -> Event:
        """The first event of a name, empty if there is none."""
        return next(iter(self.rare.get(event, [])), {})

    def last(self, event: str) -> Event:
        """The last event of a name, empty if there is none."""
        return next(reversed(self.rare.get(event, [])), {})


def read(run_dir: RunDir) -> RunData:
    """Reads a run folder: of a finished, running or failed run, or what is left of one. Never writes."""
    files = [path for path in (run_dir.events, run_dir.monitor_events) if path.is_file()]
    starts = takeover_steps(line for path in files for line in safe_read.lines(path))
    columns, decoders = Columns(starts), {path: Decoder() for path in files}
    for path, decoder in decoders.items():
        for event in decoder.events(safe_read.lines(path)):
            columns.add(event)
    try:
        info = Attempts(run_dir).info()
    except UserError:  # a damaged run.json must not hide the rest of the run
        info = {}
    attempts = sorted({int(entry["attempt"]) for entry in info.get("attempts", [])} | set(starts))
    return RunData(
        path=run_dir.path,
        info=info,
        config=run_config(run_dir.run_yaml),
        train=columns.series(columns.train),
        phases=columns.series(columns.phases),
        metrics=columns.series(columns.metrics),
        rare={name: sorted(events, key=lambda event: event["time"]) for name, events in columns.rare.items()},
        counts=dict(columns.counts),
        words={attempt: words for attempt in attempts if (words := last_words.read(run_dir, attempt))},
        notes=tuple(f"{path}: {decoder.note}" for path, decoder in decoders.items() if decoder.note),
    )


def run_config(path: Path) -> dict[str, Any]:
    """run.yaml as it stands; empty where it is missing or damaged."""
    try:
        loaded: dict[str, Any] = read_yaml(safe_read.read(path, bounded_yaml.MOST_BYTES).decode())
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return loaded if _is_config(loaded) else {}


def takeover_steps(lines: Iterable[bytes]) -> dict[int, int]:
    """The step at which each attempt took over: what earlier ones did beyond it was done again."""
    marked = (line for line in lines if b'"run_started"' in line or b'"resumed"' in line)
    return {
        event["attempt"]: event["step"]
        for event in Decoder().events(marked)
        if event["event"] in ("run_started", "resumed")
    }


class Columns:
    """Collects events as columns of numbers."""

    def __init__(self, starts: dict[int, int]) -> None:
        self.starts = starts
        self.train: dict[str, array[float]] = defaultdict(lambda: array("d"))
        self.phases: dict[str, array[float]] = defaultdict(lambda: array("d"))
        self.metrics: dict[str, array[float]] = defaultdict(lambda: array("d"))
        self.rare: dict[str, list[Event]] = defaultdict(list)
        self.counts: dict[str, int] = defaultdict(int)

    def add(self, event: Event) -> None:
        """Takes one event, unless a later attempt computed its step again."""
        name = event["event"]
        self.counts[name] += 1
        if name in REPEATED and self._repeated(event):
            return
        if name == "train":
            self._numbers(self.train, event, event)
            self._numbers(self.phases, event, event.get("seconds") or {})
        elif name == "eval":
            self._numbers(self.metrics, event, event.get("metrics") or {})
        else:
            kept = self.rare[name]
            kept.append(event)
            if len(kept) > KEPT_EVENTS:
                del kept[KEPT_EVENTS // 2]

    def series(self, columns: dict[str, array[float]]) -> dict[str, Series]:
        """The columns as curves, by time."""
        curves = {}
        for name, numbers in columns.items():
            rows = np.frombuffer(numbers, dtype=np.float64).reshape(-1, 3)
            rows = rows[np.argsort(rows[:, 1], kind="stable")]
            curves[name] = Series(rows[:, 0], rows[:, 1], rows[:, 2])
        return curves

    def _repeated(self, event: Event) -> bool:
        step, attempt = event["step"], event["attempt"]
        return any(later > attempt and step > start for later, start in self.starts.items())

    @staticmethod
    def _numbers(columns: dict[str, array[float]], event: Event, values: dict[str, Any]) -> None:
        for name, value in values.items():
            if name not in NOT_PLOTTED and is_number(value):
                columns[name].extend((event["step"], event["time"], value))


_is_config = fits({"name": (str, None), **dict.fromkeys(("launch", "train", "track", "task_args"), (dict, None))})
