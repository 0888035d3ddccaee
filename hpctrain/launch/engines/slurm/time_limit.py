"""When Slurm ends the job, and when the ranks must stop for that; anyone may change a job's limit while it runs."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain.errors import Code, NoRequeue
from hpctrain.launch.engines.slurm import client
from hpctrain.launch.engines.slurm.job import unix_seconds
from hpctrain.launch.engines.slurm.render import EARLY_S
from hpctrain.run.attempts import Attempts
from hpctrain.run.event_log import events_if_readable
from hpctrain.run.events import RunStarted
from hpctrain.run.folder import RunDir
from hpctrain.system.quantities import duration

LOOK_S = 30.0
"""Seconds between two questions to Slurm, which itself checks time limits as often."""


@dataclass
class TimeLimit:
    """The time limit of a job."""

    job: str
    signal_s: float
    """Seconds before the limit at which the job script has Slurm signal; more than half of a limit is not kept."""
    start_s: float = 0.0
    """Seconds that an attempt takes to start, if known."""
    begin: float = -math.inf
    """Unix seconds, as ``end``; infinite if unknown."""
    end: float = math.inf
    next_look: float = 0.0
    seen: int = 0
    """Number of signals for which Slurm was asked."""

    @property
    def lead_s(self) -> float:
        """Seconds before the limit at which the ranks stop."""
        return min(self.signal_s, (self.end - self.begin) / 2)

    def left_s(self) -> float:
        """Returns the seconds until Slurm ends the job; infinity if unknown. Asks Slurm every LOOK_S."""
        if (now := time.time()) >= self.next_look:
            self.next_look = now + LOOK_S
            if fields := client.job_fields(self.job):  # the end of a job without a limit is "Unknown"
                self.begin = unix_seconds(fields.get("StartTime"), -math.inf)
                self.end = unix_seconds(fields.get("EndTime"), math.inf)
        return self.end - now

    def due(self, received: Sequence[int]) -> int:
        """Returns the signal to obey: one that was received, or SIGUSR1 if it is time to stop; 0 if there is none.

        Slurm may send SIGUSR1 a minute early, and after the limit was lowered at once: not in the limit's first half.
        """
        if len(received) > self.seen:  # the limit may be another one by now
            self.seen, self.next_look = len(received), 0.0
        left_s = self.left_s()
        is_early = (self.end - self.begin) / 2 < left_s <= self.signal_s + EARLY_S
        number = next((number for number in received if number != signal.SIGUSR1 or not is_early), 0)
        return number or (signal.SIGUSR1 if left_s <= self.lead_s else 0)

    def has_room(self) -> bool:
        """Whether another attempt in this job would get to its first step."""
        return self.left_s() > self.lead_s + self.start_s

    def require_room(self) -> None:
        """Raises NoRequeue if no attempt can get to its first step within the limit."""
        self.left_s()
        if (limit_s := self.end - self.begin) <= self.lead_s + self.start_s:
            what = (
                f"the job's time limit is {duration(limit_s)}, of which the start takes {duration(self.start_s)} and "
                f"stopping {duration(self.lead_s)}: no attempt would get to a step"
            )
            raise NoRequeue(what, "raise launch.slurm.time, then hpctrain resume", Code.NO_PROGRESS)


def start_s(run: RunDir) -> float:
    """Returns the seconds that earlier attempts took at least from their start to that of training; 0 if unknown."""
    started = {attempt.number: attempt.started for attempt in Attempts(run).all() if attempt.started}
    begun = [event for event in events_if_readable(run) if isinstance(event, RunStarted)]
    return min((event.time - started[event.attempt] for event in begun if event.attempt in started), default=0.0)
