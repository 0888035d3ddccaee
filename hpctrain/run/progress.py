"""What the events of a run come to so far, in memory that does not grow with them. No I/O here."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpctrain.run.events import REPEATED, Event

RATE_INTERVALS = 16
"""Newest intervals that the rate is the mean of."""
CURVE_POINTS = 256
"""Points of a curve that are kept at least half full: when there are more, neighbours are joined."""
WARNINGS = 8
"""Newest warnings that are kept."""
NAMING = ("rank", "pauses", "host")
"""Kinds of findings of which there may be several at a time, about different ranks."""


@dataclass(frozen=True)
class Warned:
    """Something that a person should know of."""

    time: float
    """Unix seconds."""
    attempt: int
    step: int | None
    text: str


class Curve:
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


class Digest:
    """Takes a run's events one by one, those of each file in their order; the files may interleave in any way."""

    def __init__(self) -> None:
        self.attempt = 0
        """The newest attempt that has said something in training; 0 before the first."""
        self.first_step = 0
        """Where it took over."""
        self.newest: dict[str, Event] = {}
        """The newest event of each name; of training only what still counts."""
        self.num_events = 0
        self.last_time: float | None = None
        """Of the newest event, Unix seconds."""
        self.curves: dict[str, Curve] = {}
        """loss, lr, and validation metrics as ``validation NAME``."""
        self.findings: dict[tuple[Any, ...], Event] = {}
        """What the monitor has confirmed in this attempt and not taken back."""
        self.warnings: deque[Warned] = deque(maxlen=WARNINGS)
        self._marks: deque[tuple[float, int]] = deque(maxlen=RATE_INTERVALS + 1)

    def add(self, event: Event) -> None:
        """Takes one event."""
        name, time, step, attempt = event["event"], event["time"], event["step"], event["attempt"]
        self.num_events += 1
        self.last_time = max(self.last_time or time, time)
        if name in ("run_started", "resumed"):
            self._take_over(attempt, step)
        if name in REPEATED and attempt < self.attempt and step > self.first_step:
            return
        self.newest[name] = event
        if name == "train":
            self._marks.append((time, step))
            for key in ("loss", "lr"):
                self._point(key, step, event.get(key))
        elif name == "eval":
            for key, value in (event.get("metrics") or {}).items():
                self._point(f"validation {key}", step, value)
        elif name == "straggler":
            self._find(event)
        elif (sentence := warning(event)) is not None:
            self.warnings.append(Warned(time, attempt, step, sentence))

    @property
    def step(self) -> int | None:
        """Updates done, as far as anybody has said."""
        steps = [self.newest[name]["step"] for name in ("train", "resumed", "run_started") if name in self.newest]
        return max([*steps, *([self.first_step] if self.attempt else [])], default=None)

    @property
    def total_steps(self) -> int | None:
        """Updates of the whole run."""
        told = [self.newest.get(name, {}).get("total_steps") for name in ("train", "run_started")]
        return next((int(steps) for steps in told if steps), None)

    @property
    def steps_per_s(self) -> float | None:
        """Over the newest intervals, by wall-clock time; None before the first."""
        if len(self._marks) > 1:
            (begin, first), (end, last) = self._marks[0], self._marks[-1]
            return (last - first) / (end - begin) if end > begin and last > first else None
        train = self.newest.get("train", {})
        seconds = sum(filter(None, (train.get("seconds") or {}).values()))
        return train["steps"] / seconds if train.get("steps") and seconds > 0 else None

    @property
    def hang(self) -> Event | None:
        """The hang that this attempt has not got out of."""
        hang = self.newest.get("hang")
        moved = self.newest.get("train", {}).get("time", 0.0)
        return hang if hang and hang["attempt"] >= self.attempt and hang["time"] > moved else None

    @property
    def failing_saves(self) -> str | None:
        """That checkpoints fail again and again, as a sentence, as long as none has been saved since."""
        failed, saved = self.newest.get("checkpoint_failed"), self.newest.get("checkpoint_saved")
        if not failed or failed["attempt"] < self.attempt or (saved and saved["time"] > failed["time"]):
            return None
        newest = f"the newest is of step {saved['step']}" if saved else "there is none"
        return f"{in_a_row(failed)} failed, the last at step {failed['step']}; {newest}: {failed.get('error')}"

    def _take_over(self, attempt: int, step: int) -> None:
        """An attempt begins: what earlier ones did beyond its first step does not count."""
        if attempt < self.attempt:
            return
        if attempt > self.attempt:
            self._marks.clear()
            self.findings = {key: event for key, event in self.findings.items() if event["attempt"] >= attempt}
        self.attempt, self.first_step = attempt, step
        for curve in self.curves.values():
            curve.cut(step)
        for name in REPEATED:
            if self.newest.get(name, {}).get("step", 0) > step:
                del self.newest[name]
        if self.newest.get("resumed", {}).get("step", 0) > step:
            del self.newest["resumed"]

    def _point(self, name: str, step: int, value: Any) -> None:
        if isinstance(value, (int, float)):
            self.curves.setdefault(name, Curve()).add(step, value)

    def _find(self, event: Event) -> None:
        if event["attempt"] < self.attempt:
            return
        kind = event.get("kind")
        key = (kind, *event.get("ranks", ())) if kind in NAMING else (kind,)
        self.findings.pop(key, None)
        if event.get("state") == "confirmed":
            self.findings[key] = event


def warning(event: Mapping[str, Any]) -> str | None:
    """A sentence on what a person should know of; None for events that go well."""
    name = event["event"]
    if name == "checkpoint_failed":
        again = f" ({in_a_row(event)})" if (event.get("failures") or 1) > 1 else ""
        return f"the checkpoint could not be written{again}: {event.get('error')}"
    if name == "hang":
        return str(event.get("sentence") or "no rank moves")
    if name == "stop_requested":
        return f"asked to stop by {event.get('by')}"
    if name == "resumed" and event.get("rejected"):
        rejected = event["rejected"][0]
        return f"the checkpoint of step {rejected.get('step')} was not used: {rejected.get('reason')}"
    return None


def in_a_row(failed: Mapping[str, Any]) -> str:
    """How many checkpoints have failed since one was saved, by the newest ``checkpoint_failed``."""
    count = failed.get("failures") or 1
    return "1 checkpoint" if count == 1 else f"{count} checkpoints in a row"


def finding(event: Mapping[str, Any]) -> str:
    """What the monitor found, as a sentence."""
    return str(event.get("sentence") or f"rank {event.get('rank')} on {event.get('host')}: {event.get('cause')}")


def outcome(attempts: Sequence[Mapping[str, Any]], started: Mapping[str, Any], finished: Mapping[str, Any]) -> str:
    """How a run stands by what it has left.

    Completed, early_stop, stop_requested, done, stop, failed, running, or unknown.

    Args:
        attempts: of run.json, oldest first.
        started: the newest ``run_started`` event, empty if there is none.
        finished: the newest ``run_finished`` event, the same.

    Running says only that nobody wrote an end: processes that were killed do not.
    """
    newest = int(attempts[-1]["attempt"]) if attempts else started.get("attempt", 0)
    if finished and finished["attempt"] >= newest:
        return str(finished.get("reason", "completed"))
    verdict = attempts[-1].get("verdict") if attempts else None
    if isinstance(verdict, Mapping):
        action = verdict.get("action")
        return "failed" if action in ("fail", "requeue", "do_not_requeue") else str(action)
    return "running" if attempts and attempts[-1].get("ended") is None else "unknown"


def _join(one: tuple[int, float, int], other: tuple[int, float, int]) -> tuple[int, float, int]:
    return other[0], one[1] + other[1], one[2] + other[2]
