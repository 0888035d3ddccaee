"""A summary of a run's events so far, in memory that does not grow with their number. No I/O here."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import TypeVar

from hpctrain.errors import Code
from hpctrain.run import events
from hpctrain.run.time_account import Sums
from hpctrain.system.json_shape import is_number

Kind = TypeVar("Kind", bound=events.Event)

RATE_INTERVALS = 16
"""Number of newest intervals over which the rate is averaged."""
CURVE_POINTS = 256
"""Maximum number of points of a curve; when it is reached, pairs of neighbours are merged."""
WARNINGS = 8
"""Number of newest warnings kept."""


@dataclass(frozen=True)
class Warned:
    """A warning for people."""

    time: float
    """Unix seconds."""
    attempt: int
    step: int | None
    text: str
    is_orderly: bool = False
    """Whether it is a stop request, after which the run can be resumed."""


class ProgressCurve:
    """A value over the steps, as means over equal numbers of events."""

    def __init__(self) -> None:
        self.points: list[tuple[int, float, int]] = []
        """For each point: last step, sum and number of its values."""
        self.per_point = 1

    def add(self, step: int, value: float) -> None:
        """Adds the next value; ignores values that are not finite."""
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
        """Removes points beyond a step, since they will be computed again."""
        while self.points and self.points[-1][0] > step:
            self.points.pop()

    def means(self) -> list[float]:
        """Returns the points' mean values, by step."""
        return [total / number for _, total, number in self.points]


class Progress:
    """Summarizes a run's events, added one by one. Each file's events must be in order; files may interleave freely."""

    def __init__(self) -> None:
        self.attempt = 0
        """The newest attempt that has begun to train; 0 before the first."""
        self.first_step = 0
        """Step at which it took over."""
        self.num_events = 0
        self.last_time: float | None = None
        """Time of the newest event, Unix seconds."""
        self.curves: dict[str, ProgressCurve] = {}
        """Curves by name: loss, lr, learning rate, metrics as ``training NAME`` and ``validation NAME``."""
        self.findings: dict[tuple[object, ...], events.Straggler] = {}
        """The monitor's confirmed findings in this attempt that are not over."""
        self.warnings: deque[Warned] = deque(maxlen=WARNINGS)
        self.sums = Sums()
        """Recoveries and the time account."""
        self._newest: dict[type[events.Event], events.Event] = {}
        self._marks: deque[tuple[float, int]] = deque(maxlen=RATE_INTERVALS + 1)

    def newest(self, kind: type[Kind]) -> Kind | None:
        """Returns the newest event of a kind, ignoring Train and Eval events that a later attempt repeats."""
        found = self._newest.get(kind)
        return found if isinstance(found, kind) else None

    def count_from(self, first: int) -> None:
        """Leaves attempts before ``first`` out of the recoveries and the time account."""
        if first != self.sums.first:
            self.sums = Sums(first)

    def add(self, event: events.Event) -> None:
        """Adds one event."""
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
            self._point("learning rate", event.step, event.learning_rate)
            for key, value in event.more.items():
                self._point(f"training {key}", event.step, value if is_number(value) else None)
        elif isinstance(event, events.Eval):
            for key, value in event.metrics.items():
                self._point(f"validation {key}", event.step, value)
        elif isinstance(event, events.Straggler):
            self._find(event)
        elif (sentence := warning(event)) is not None:
            is_orderly = isinstance(event, events.StopRequested)
            self.warnings.append(Warned(event.time, event.attempt, event.step, sentence, is_orderly))

    @property
    def step(self) -> int | None:
        """Number of updates done, as far as known."""
        known = [self.newest(events.Train), self.newest(events.Resumed), self.newest(events.RunStarted)]
        steps = [event.step for event in known if event is not None]
        return max([*steps, *([self.first_step] if self.attempt else [])], default=None)

    @property
    def total_steps(self) -> int | None:
        """Total number of updates in the run, if known."""
        known = (self.newest(events.Train), self.newest(events.RunStarted))
        return next((event.total_steps for event in known if event and event.total_steps), None)

    @property
    def steps_per_s(self) -> float | None:
        """Steps per second of wall time over the newest intervals; None before the first."""
        if len(self._marks) > 1:
            (begin, first), (end, last) = self._marks[0], self._marks[-1]
            return (last - first) / (end - begin) if end > begin and last > first else None
        if (train := self.newest(events.Train)) is None or not train.steps:
            return None
        seconds = sum(filter(None, train.seconds.values()))
        return train.steps / seconds if seconds > 0 else None

    @property
    def left_s(self) -> float | None:
        """Estimated seconds from the newest interval to the end of the run, at the measured rate."""
        if self.step is None or not self.total_steps or not self.steps_per_s:
            return None
        return (self.total_steps - self.step) / self.steps_per_s

    @property
    def failing_saves(self) -> str | None:
        """A sentence saying that checkpoints fail; None if one has been saved since."""
        failed = self.newest(events.CheckpointFailed)
        saved = self.newest(events.CheckpointSaved)
        if not failed or failed.attempt < self.attempt or (saved and saved.time > failed.time):
            return None
        newest = f"the newest is from step {saved.step}" if saved else "there is none"
        return f"{in_a_row(failed)} failed, the last at step {failed.step}; {newest}: {failed.error}"

    @property
    def store_away(self) -> str | None:
        """A sentence saying that checkpoints do not reach the object store; None if one has since."""
        away = self.newest(events.StoreAway)
        stored = self.newest(events.CheckpointStored)
        if not away or away.attempt < self.attempt or (stored and stored.time > away.time):
            return None
        newest = f"the newest there is from step {stored.step}" if stored else "none has been sent"
        return f"checkpoints do not reach {away.path}; {newest}: {away.error}"

    @property
    def hang(self) -> events.Hang | None:
        """The current hang of this attempt; None if it has trained since."""
        hang, train = self.newest(events.Hang), self.newest(events.Train)
        moved = train is not None and hang is not None and train.time >= hang.time
        return hang if hang and hang.attempt >= self.attempt and not moved else None

    def _take_over(self, event: events.RunStarted | events.Resumed) -> None:
        """Starts a new attempt: steps of earlier ones beyond its first step no longer count."""
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
    """Returns a sentence for an event that people should know about, else None."""
    if isinstance(event, events.CheckpointFailed):
        again = f" ({in_a_row(event)})" if (event.failures or 1) > 1 else ""
        return f"the checkpoint could not be written{again}: {event.error}"
    if isinstance(event, events.StoreAway):
        return f"checkpoints do not reach {event.path}: {event.error}"
    if isinstance(event, (events.Hang, events.Recovered)):
        return event.text
    if isinstance(event, events.StopRequested):
        return f"asked to stop {'before the time limit' if event.code == Code.TIME_LIMIT else f'by {event.by}'}"
    if isinstance(event, events.Resumed) and event.rejected:
        return f"the checkpoint of step {event.rejected[0].step} was not used: {event.rejected[0].reason}"
    return None


def in_a_row(failed: events.CheckpointFailed) -> str:
    """Says how many checkpoints have failed since one was saved."""
    count = failed.failures or 1
    return "1 checkpoint" if count == 1 else f"{count} checkpoints in a row"


def _join(one: tuple[int, float, int], other: tuple[int, float, int]) -> tuple[int, float, int]:
    return other[0], one[1] + other[1], one[2] + other[2]
