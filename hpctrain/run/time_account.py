"""Accounts for a run's wall time: new steps, failures, waiting, saving. No I/O here."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from hpctrain.run.attempts import Attempt
from hpctrain.run.events import CheckpointSaved, Event, Recovered, SnapshotSaved, Train
from hpctrain.run.verdict import Action
from hpctrain.system.quantities import duration

USEFUL = ("data", "to_device", "forward", "backward", "exchange", "optimizer")
"""Phases that count as useful time; callbacks and checkpoints do not."""
TOLD = 0.001
"""Losses up to this fraction of the wall time are not mentioned."""
ATTEMPTS = 1000
"""Number of newest attempts whose times are kept."""
SHORT_S = 60.0
"""Runs below this wall time mostly start and warm up: fractions of their time say nothing about longer ones."""
RECOVERIES = 64
"""Number of newest recoveries kept; the sums include all."""


@dataclass(frozen=True)
class TimeAccount:
    """Where a run's time went, in seconds.

    The rest of ``wall_s`` is start-up, evaluation, callbacks and shutdown of attempts.
    """

    goodput: float | None
    """Fraction of the wall time spent in new steps; None before the first."""
    wall_s: float
    """From the start of the first attempt to the end of the last one, or to the newest event."""
    steps_s: float
    """Time in steps that no earlier attempt had reported."""
    failures: int
    """Number of failures that the run recovered from."""
    failures_s: float
    """Time from the first death to the next new step, without ``waiting_s``, plus that of repeated steps."""
    repeated_steps: int
    waiting_s: float
    """Time between attempts, except those restarted in place within a job."""
    saving_s: float
    """Time for which checkpoints and snapshots paused training."""

    @property
    def is_short(self) -> bool:
        """Whether the run is too short for its fractions to mean anything, and survived no failure."""
        return self.wall_s < SHORT_S and not self.failures

    @property
    def text(self) -> str:
        """The account as a sentence; empty before the first step."""
        if self.goodput is None:
            return ""
        if self.is_short:
            return f"too short to judge ({duration(self.wall_s)})"
        again = f", {self.repeated_steps} steps done again" if self.repeated_steps else ""
        failures = "1 failure" if self.failures == 1 else f"{self.failures} failures"
        lost = {f"to {failures}{again}": self.failures_s, "waiting": self.waiting_s, "saving": self.saving_s}
        losses = "; ".join(
            f"{duration(seconds)} {what}" for what, seconds in lost.items() if seconds > TOLD * self.wall_s
        )
        return f"{self.goodput:.0%} of {duration(self.wall_s)}" + (f"; lost: {losses}" if losses else "")


class Sums:
    """Sums up a run's events, added one by one, in memory that does not grow with their number.

    Args:
        first: number of the run's first attempt; earlier ones do not count.
    """

    def __init__(self, first: int = 0) -> None:
        self.first = first
        self.recoveries: deque[Recovered] = deque(maxlen=RECOVERIES)
        self.times: dict[int, tuple[float, float]] = {}
        """Unix seconds of each attempt's first and newest event."""
        self._reached = 0
        self._steps = 0
        self._all_s = 0.0
        self._new_s = 0.0
        self._saving_s = 0.0
        self._failures, self._failures_s, self._repeated = 0, 0.0, 0

    def add(self, event: Event) -> None:
        """Adds one event."""
        if event.attempt < self.first:
            return
        first, newest = self.times.get(event.attempt, (event.time, event.time))
        self.times[event.attempt] = min(first, event.time), max(newest, event.time)
        if len(self.times) > ATTEMPTS:
            del self.times[next(iter(self.times))]
        if isinstance(event, Train):
            # A step's time counts as useful when it is first reported; repeating it is a loss of the later attempt.
            steps = max(event.steps or 1, 1)
            new = min(max(event.step - self._reached, 0), steps)
            self._new_s += new / steps * sum(event.seconds.get(phase) or 0.0 for phase in USEFUL)
            self._steps += steps
            self._all_s += sum(filter(None, event.seconds.values()))
            self._reached = max(self._reached, event.step)
        elif isinstance(event, (CheckpointSaved, SnapshotSaved)):
            self._saving_s += event.stall_s or 0.0
        elif isinstance(event, Recovered):
            self.recoveries.append(event)
            self._failures += 1
            self._failures_s += max(event.seconds or 0.0, 0.0)
            self._repeated += event.repeated_steps or 0

    def account(self, attempts: Sequence[Attempt]) -> TimeAccount:
        """Returns the account of the events and these attempts (oldest first), without those that had nothing to do."""
        idle = {each.number for each in attempts if each.found_complete}
        attempts = [each for each in attempts if each.number not in idle]
        known = (attempts[0].started, attempts[-1].ended) if attempts else ()
        seen = [each for number, pair in self.times.items() if number not in idle for each in pair]
        moments = [*seen, *(each for each in known if each is not None)]
        recovered = self.recoveries[-1].attempt if self.recoveries else 0
        waiting_s, of_failures_s = 0.0, 0.0
        for before, after in pairwise(attempts):
            waited = self._waited(before, after)
            waiting_s += waited
            verdict = before.verdict
            if verdict and verdict.is_failure and verdict.action is not Action.FAIL and after.number <= recovered:
                of_failures_s += waited
        again_s = self._repeated * self._all_s / self._steps if self._steps else 0.0
        failures_s = max(0.0, self._failures_s - of_failures_s) + again_s
        wall_s = max(moments) - min(moments) if moments else 0.0
        return TimeAccount(
            goodput=min(self._new_s / wall_s, 1.0) if wall_s > 0 and self._new_s > 0 else None,
            wall_s=wall_s,
            steps_s=self._new_s,
            failures=self._failures,
            failures_s=failures_s,
            repeated_steps=self._repeated,
            waiting_s=waiting_s,
            saving_s=self._saving_s,
        )

    def _waited(self, before: Attempt, after: Attempt) -> float:
        """Returns the seconds between two attempts; 0 if the second was restarted in place."""
        is_in_place = after.job is not None and (after.job, after.restarts) == (before.job, before.restarts)
        ended = self.times.get(before.number, (None, None))[1] if before.ended is None else before.ended
        return 0.0 if is_in_place or after.started is None or ended is None else max(0.0, after.started - ended)
