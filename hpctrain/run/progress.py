"""What the events of a run come to so far, in memory that does not grow with them. No I/O here."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import TypeVar

from hpctrain.run import events
from hpctrain.run.time_account import Sums

Kind = TypeVar("Kind", bound=events.Event)

RATE_INTERVALS = 16
"""Newest intervals that the rate is the mean of."""
CURVE_POINTS = 256
"""Points of a curve that are kept at least half full: when there are more, neighbours are joined."""
WARNINGS = 8
"""Newest warnings that are kept."""


@dataclass(frozen=True)
class Warned:
    """Something that a person should know of."""

    time: float
    """Unix seconds."""
    attempt: int
    step: int | None
    text: str


class ProgressCurve:
    """One value over the steps, as means over equally many events."""

    def __init__(self) -> None:
        self.points: list[tuple[int, float, int]] = []
        """Last step, sum and number of the values that a point joins."""
        self.per_point = 1

    def add(self, step: int, value: float) -> None:
        """Takes the next value; those that are not finite are left out."""
        if not math.isfinite(value):
            return
        if self.points and self.points[-1][2] < self.per_point:
            _, total, number = self.points.pop()
            self.points.append((step, total + value, number + 1))
            return
        if len(self.points) == CURVE_POINTS:
            self.points = [_join(*pair) for pair in zip(self.points[::2], self.points[1::2], strict=True)]
            self.per_point *= 2
        self.points.append((step, value, 1))

    def cut(self, step: int) -> None:
        """Forgets what lies beyond a step: it is computed again."""
        while self.points and self.points[-1][0] > step:
            self.points.pop()

    def means(self) -> list[float]:
        """The points' values, by step."""
        return [total / number for _, total, number in self.points]


class Progress:
    """Takes a run's events one by one, those of each file in their order; the files may interleave in any way."""

    def __init__(self) -> None:
        self.attempt = 0
        """The newest attempt that has said something in training; 0 before the first."""
        self.first_step = 0
        """Where it took over."""
        self.num_events = 0
        self.last_time: float | None = None
        """Of the newest event, Unix seconds."""
        self.curves: dict[str, ProgressCurve] = {}
        """loss, lr, and validation metrics as ``validation NAME``."""
        self.findings: dict[tuple[object, ...], events.Straggler] = {}
        """What the monitor has confirmed in this attempt and not taken back."""
        self.warnings: deque[Warned] = deque(maxlen=WARNINGS)
        self.sums = Sums()
        """Recoveries, and where the time went."""
        self._newest: dict[type[events.Event], events.Event] = {}
        self._marks: deque[tuple[float, int]] = deque(maxlen=RATE_INTERVALS + 1)

    def newest(self, kind: type[Kind]) -> Kind | None:
        """The newest event of a kind; of training and evaluation only what still counts."""
        found = self._newest.get(kind)
        return found if isinstance(found, kind) else None

    def add(self, event: events.Event) -> None:
        """Takes one event."""
        self.num_events += 1
        self.last_time = max(self.last_time or event.time, event.time)
        self.sums.add(event)
        if isinstance(event, events.TakeOver):
            self._take_over(event)
        if isinstance(event, events.Repeated) and event.attempt < self.attempt and event.step > self.first_step:
            return
        self._newest[type(event)] = event
        if isinstance(event, events.Train):
            self._marks.append((event.time, event.step))
            self._point("loss", event.step, event.loss)
            self._point("lr", event.step, event.lr)
        elif isinstance(event, events.Eval):
            for key, value in event.metrics.items():
                self._point(f"validation {key}", event.step, value)
        elif isinstance(event, events.Straggler):
            self._find(event)
        elif (sentence := warning(event)) is not None:
            self.warnings.append(Warned(event.time, event.attempt, event.step, sentence))

    @property
    def step(self) -> int | None:
        """Updates done, as far as is known."""
        told = [self.newest(events.Train), self.newest(events.Resumed), self.newest(events.RunStarted)]
        steps = [event.step for event in told if event is not None]
        return max([*steps, *([self.first_step] if self.attempt else [])], default=None)

    @property
    def total_steps(self) -> int | None:
        """Updates of the whole run."""
        told = [
            event.total_steps
            for event in (self.newest(events.Train), self.newest(events.RunStarted))
            if event is not None
        ]
        return next((steps for steps in told if steps), None)

    @property
    def steps_per_s(self) -> float | None:
        """Over the newest intervals, by wall-clock time; None before the first."""
        if len(self._marks) > 1:
            (begin, first), (end, last) = self._marks[0], self._marks[-1]
            return (last - first) / (end - begin) if end > begin and last > first else None
        if (train := self.newest(events.Train)) is None or not train.steps:
            return None
        seconds = sum(filter(None, train.seconds.values()))
        return train.steps / seconds if seconds > 0 else None

    @property
    def left_s(self) -> float | None:
        """Seconds from the newest interval to the last step, at the measured rate."""
        if self.step is None or not self.total_steps or not self.steps_per_s:
            return None
        return (self.total_steps - self.step) / self.steps_per_s

    @property
    def failing_saves(self) -> str | None:
        """That checkpoints fail again and again, as a sentence, as long as none has been saved since."""
        failed, saved = self.newest(events.CheckpointFailed), self.newest(events.CheckpointSaved)
        if not failed or failed.attempt < self.attempt or (saved and saved.time > failed.time):
            return None
        newest = f"the newest is from step {saved.step}" if saved else "there is none"
        return f"{in_a_row(failed)} failed, the last at step {failed.step}; {newest}: {failed.error}"

    @property
    def store_away(self) -> str | None:
        """That checkpoints do not reach the object store, as a sentence, as long as none has since."""
        away, stored = self.newest(events.StoreAway), self.newest(events.CheckpointStored)
        if not away or away.attempt < self.attempt or (stored and stored.time > away.time):
            return None
        newest = f"the newest there is from step {stored.step}" if stored else "none has been sent"
        return f"checkpoints do not reach {away.path}; {newest}: {away.error}"

    @property
    def hang(self) -> events.Hang | None:
        """The hang that this attempt has not got out of."""
        hang, train = self.newest(events.Hang), self.newest(events.Train)
        moved = train is not None and hang is not None and train.time >= hang.time
        return hang if hang and hang.attempt >= self.attempt and not moved else None

    def _take_over(self, event: events.RunStarted | events.Resumed) -> None:
        """An attempt begins: what earlier ones did beyond its first step does not count."""
        attempt, step = event.attempt, event.step
        if attempt < self.attempt:
            return
        if attempt > self.attempt:
            self._marks.clear()
            self.findings = {key: event for key, event in self.findings.items() if event.attempt >= attempt}
        self.attempt, self.first_step = attempt, step
        for curve in self.curves.values():
            curve.cut(step)
        for kind in (events.Train, events.Eval, events.Resumed):
            if kind in self._newest and self._newest[kind].step > step:
                del self._newest[kind]

    def _point(self, name: str, step: int, value: float | None) -> None:
        if value is not None:
            self.curves.setdefault(name, ProgressCurve()).add(step, value)

    def _find(self, event: events.Straggler) -> None:
        if event.attempt < self.attempt:
            return
        self.findings.pop(event.about, None)
        if event.state == "confirmed":
            self.findings[event.about] = event


def warning(event: events.Event) -> str | None:
    """A sentence on what a person should know of; None for events that go well."""
    if isinstance(event, events.CheckpointFailed):
        again = f" ({in_a_row(event)})" if (event.failures or 1) > 1 else ""
        return f"the checkpoint could not be written{again}: {event.error}"
    if isinstance(event, events.StoreAway):
        return f"checkpoints do not reach {event.path}: {event.error}"
    if isinstance(event, (events.Hang, events.Recovered)):
        return event.text
    if isinstance(event, events.StopRequested):
        return f"asked to stop by {event.by}"
    if isinstance(event, events.Resumed) and event.rejected:
        return f"the checkpoint of step {event.rejected[0].step} was not used: {event.rejected[0].reason}"
    return None


def in_a_row(failed: events.CheckpointFailed) -> str:
    """How many checkpoints have failed since one was saved."""
    count = failed.failures or 1
    return "1 checkpoint" if count == 1 else f"{count} checkpoints in a row"


def _join(one: tuple[int, float, int], other: tuple[int, float, int]) -> tuple[int, float, int]:
    return other[0], one[1] + other[1], one[2] + other[2]
