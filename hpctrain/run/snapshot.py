"""What is known of a run at one moment. No I/O here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpctrain.run.attempt_record import Attempt
from hpctrain.run.events import RunFinished, RunStarted
from hpctrain.run.job import QueueEntry
from hpctrain.run.last_words import AttemptWords
from hpctrain.run.progress import Progress
from hpctrain.run.standing import Life, Outcome, State, of_run, outcome


@dataclass(frozen=True)
class LiveRank:
    """A rank in the monitor's last window: medians of its steps."""

    rank: int
    host: str
    busy_s: float
    wait_s: float
    excess: float
    """Busy time above the median of the other ranks, 0.2 for 20%."""


@dataclass(frozen=True)
class LiveWindow:
    """The monitor's last window."""

    attempt: int | None = None
    step: int | None = None
    """Its end."""
    num_ranks: int | None = None
    ranks: tuple[LiveRank, ...] = ()
    """By rank; of very many, those that the monitor found busiest."""
    verdicts: tuple[str, ...] | None = None
    """The monitor's findings at the moment, suspicions included, as sentences; None if it does not say."""
    dropped_windows: int = 0

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> LiveWindow:
        """The content of monitor/live.json, of the types that it should have."""
        names = tuple(LiveRank.__dataclass_fields__)
        whole = [entry for entry in saved.get("ranks") or () if all(name in entry for name in names)]
        ranks = sorted((LiveRank(*(entry[name] for name in names)) for entry in whole), key=lambda rank: rank.rank)
        numbers = {name: saved.get(name) for name in ("attempt", "step", "num_ranks")}
        told, dropped = saved.get("verdicts"), saved.get("dropped_windows") or 0
        verdicts = None if told is None else tuple(told)
        return cls(**numbers, ranks=tuple(ranks), verdicts=verdicts, dropped_windows=dropped)


@dataclass(frozen=True)
class RunSnapshot:
    """A run at one moment; what its folder does not say is None or empty."""

    path: Path
    """The run folder."""
    id: str | None
    config: Mapping[str, Any]
    """run.yaml: the resolved run file."""
    attempts: tuple[Attempt, ...]
    """The oldest first."""
    progress: Progress
    """What the events come to so far."""
    life: Life | None = None
    """Who holds the run folder."""
    live: LiveWindow | None = None
    """The monitor's last window."""
    left_out: str = ""
    """What was left out of the events, being none of the run's own; for people."""
    is_behind: bool = False
    """Events are still being read: this is how the run stood before them."""
    stop_requested_by: str | None = None
    """Who asked the run to stop; ``RunView.look`` does not ask."""
    checkpoint_step: int | None = None
    """Step of the newest checkpoint; ``RunView.look`` does not ask."""
    words: Mapping[int, AttemptWords] = field(default_factory=dict)
    """Last words by attempt; ``RunView.look`` does not ask."""

    @property
    def name(self) -> str:
        """The run's name, or that of its folder."""
        return str(self.config.get("name") or self.path.name)

    @property
    def newest(self) -> Attempt | None:
        """The newest attempt."""
        return self.attempts[-1] if self.attempts else None

    @property
    def outcome(self) -> Outcome:
        """How the run stands by what it has left; ``state`` asks who lives, too."""
        return outcome(self.attempts, self.progress.newest(RunStarted), self.progress.newest(RunFinished))

    def state(self, now: float, job: QueueEntry | None = None) -> State:
        """How the run stands.

        Args:
            now: Unix seconds.
            job: its living or newest job; None without Slurm, or if Slurm knows none.
        """
        is_command = bool((self.config.get("launch") or {}).get("command"))
        return of_run(self.attempts, self.progress, self.life, job, now, has_events=not is_command)
