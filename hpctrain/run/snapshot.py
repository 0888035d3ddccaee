"""What is known of a run at one moment. No I/O here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpctrain.run.attempt_record import Attempt
from hpctrain.run.events import RunFinished, RunStarted
from hpctrain.run.last_words import AttemptWords
from hpctrain.run.progress import Progress
from hpctrain.run.run_status import Life, Outcome, QueueEntry, State, of_run, outcome
from hpctrain.run.time_account import TimeAccount


@dataclass(frozen=True)
class LiveRank:
    """A rank in the monitor's last window: medians of its steps."""

    rank: int
    host: str
    busy_s: float
    wait_s: float
    excess: float
    """Busy time above the median of the other ranks, 0.2 for 20%."""
    cost: float = 0.0
    """Share of the window that the run would save without this rank's delay."""


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
    data: Mapping[str, Any] = field(default_factory=dict)
    """What is trained on: ``fingerprint``, ``samples`` (number), ``sources`` (tables)."""

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
        """The state of the run from its files; ``state`` also checks living processes."""
        return outcome(self.attempts, self.progress.newest(RunStarted), self.progress.newest(RunFinished))

    @property
    def account(self) -> TimeAccount:
        """Where the run's time went so far."""
        return self.progress.sums.account(self.attempts)

    def state(self, now: float, job: QueueEntry | None = None) -> State:
        """How the run stands.

        Args:
            now: Unix seconds.
            job: its living or newest job; None without Slurm, or if Slurm knows none.
        """
        is_command = bool((self.config.get("launch") or {}).get("command"))
        return of_run(self.attempts, self.progress, self.life, job, now, has_events=not is_command)
