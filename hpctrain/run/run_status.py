"""What is known of a run at one moment: whether it waits, runs or has ended, by files, processes and Slurm. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from hpctrain.errors import Code, ExitCode
from hpctrain.run.attempt_record import Attempt
from hpctrain.run.events import RunFinished, RunStarted
from hpctrain.run.last_words import AttemptWords
from hpctrain.run.live_lock import STALE_S
from hpctrain.run.progress import Progress
from hpctrain.run.time_account import TimeAccount
from hpctrain.run.verdict import FIXES, Action, RunVerdict

ALIVE = (
    *("PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED"),
    *("STOPPED", "REQUEUED", "REQUEUE_HOLD", "RESIZING", "STAGE_OUT"),
)
"""States of jobs that may still act on the run folder."""
UNKNOWN = "UNKNOWN"
"""State of jobs that the scheduler does not report or has forgotten: they may have ended in any way."""
REFUSED = "REFUSED"
"""State of what a scheduler did not take as a job."""

ADVICE = {
    "DependencyNeverSatisfied": "a job that it waits for did not end well: cancel it, and submit it without --after",
    "Dependency": "it begins when the jobs that it waits for have ended well",
    "JobHeldUser": "it is held: scontrol release lets it begin",
    "JobHeldAdmin": "an administrator holds it: ask the site",
    "BeginTime": "it begins at launch.slurm.begin, or some time after a requeue",
    "PartitionNodeLimit": "the partition never gives as many nodes: lower launch.nodes, or take another partition",
    "PartitionTimeLimit": "the partition never gives that much time: lower launch.slurm.time",
    "ReqNodeNotAvail": "nodes that it needs are down or reserved: sinfo -R tells why",
}
"""What to do about the reasons for which jobs wait longest."""


@dataclass(frozen=True)
class QueueEntry:
    """One job, or one element of an array, as Slurm knows it."""

    id: str
    """123, or 120_4 for element 4 of array 120."""
    state: str
    """PENDING, RUNNING, COMPLETED, FAILED, CANCELLED, TIMEOUT, NODE_FAIL, PREEMPTED, OUT_OF_MEMORY ..."""
    reason: str = ""
    """Why it waits, or ended."""
    elapsed: str = ""
    left: str = ""
    limit: str = ""
    nodes: str = ""
    start: str = ""


WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "CONFIGURING")
"""States of jobs that have not begun."""
ORDERLY = (ExitCode.DONE, ExitCode.STOPPED)
"""Exit codes of attempts that ended as planned or on request."""
FRESH_S = 60.0
"""Silence up to which a folder whose events are all there is counts as that of a live run."""


class Word(StrEnum):
    """How a run stands."""

    NOT_STARTED = "not started"
    PENDING = "pending"
    """Waits for Slurm, for the first time or to continue."""
    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"
    """On request, with a checkpoint: the same command resumes."""
    FAILED = "failed"
    CANCELLED = "cancelled"
    """Its job was taken out of the queue, or ended by somebody before the run could conclude anything."""
    UNKNOWN = "unknown"
    """No process is known to work on it, and no record says how it ended."""


@dataclass(frozen=True)
class State:
    """How a run stands, and why."""

    word: Word
    why: str = ""
    is_over: bool = False
    """Nothing more will happen unless somebody acts."""
    code: Code = Code.UNKNOWN
    """Why, for programs, as far as the job tells it."""
    fix: str = ""
    """What to do, as far as the job tells it."""


BY_JOB = {
    **dict.fromkeys(("TIMEOUT", "DEADLINE"), Code.TIME_LIMIT),
    **dict.fromkeys(("NODE_FAIL", "BOOT_FAIL"), Code.NODE),
    "OUT_OF_MEMORY": Code.OUT_OF_MEMORY,
    "CANCELLED": Code.CANCELLED,
    "PREEMPTED": Code.KILLED,
}
"""What the end of a job says of a run that could not say how it ended."""


@dataclass(frozen=True)
class Life:
    """The process that uses the run folder."""

    lives: bool
    sure: bool
    """It is or was a process of this machine: whether it lives is known, not guessed from its last sign of life."""
    name: str
    """Process and host."""


class Outcome(StrEnum):
    """The state of a run from its files, whichever process may be alive."""

    COMPLETED = "completed"
    EARLY = "early_stop"
    DONE = "done"
    """By its supervisor: its ranks left no event of their end, as plain commands do not."""
    STOPPED_BY_RANKS = "stop_requested"
    STOPPED = "stop"
    """By its supervisor."""
    FAILED = "failed"
    RUNNING = "running"
    """No process wrote an end; those that are killed do not."""
    UNKNOWN = "unknown"

    @property
    def word(self) -> Word:
        """The same, without who says so."""
        return WORDS.get(self, Word.UNKNOWN)


WORDS = {
    **dict.fromkeys((Outcome.COMPLETED, Outcome.EARLY, Outcome.DONE), Word.FINISHED),
    **dict.fromkeys((Outcome.STOPPED_BY_RANKS, Outcome.STOPPED), Word.STOPPED),
    Outcome.FAILED: Word.FAILED,
}


def outcome(attempts: Sequence[Attempt], started: RunStarted | None, finished: RunFinished | None) -> Outcome:
    """The state of a run from its files.

    Args:
        attempts: of run.json, oldest first.
        started: the newest event of its kind.
        finished: the same.
    """
    newest = attempts[-1].number if attempts else started.attempt if started else 0
    if finished and finished.attempt >= newest:
        reason = finished.reason or Outcome.COMPLETED
        return Outcome(reason) if reason in set(Outcome) else Outcome.UNKNOWN
    if not attempts:
        return Outcome.UNKNOWN
    if verdict := attempts[-1].verdict:
        if verdict.is_failure:
            return Outcome.FAILED
        return Outcome.DONE if verdict.action is Action.DONE else Outcome.STOPPED
    return Outcome.RUNNING if attempts[-1].ended is None else Outcome.UNKNOWN


def of_run(
    attempts: Sequence[Attempt],
    progress: Progress,
    life: Life | None,
    job: QueueEntry | None,
    now: float,
    has_events: bool = True,
) -> State:
    """How a run stands.

    Args:
        attempts: of run.json, oldest first.
        progress: what its events come to.
        life: who holds the run folder; None if no process does.
        job: its living or newest job, perhaps UNKNOWN or REFUSED; None without one.
        now: Unix seconds.
        has_events: whether its ranks write events; plain commands do not.
    """
    unclear = job if job is not None and job.state in (UNKNOWN, REFUSED) else None
    job = None if unclear else job
    newest = attempts[-1] if attempts else None
    left = outcome(attempts, progress.newest(RunStarted), progress.newest(RunFinished))
    verdict = newest.verdict if newest else None
    reason = verdict.reason if verdict else ""
    has_ended = newest is not None and newest.ended is not None
    if left.word is Word.FINISHED and (has_ended or not (life and life.lives)):
        return State(left.word, reason or left, is_over=True)
    if job is not None and job.state in WAITING:
        waits = f"job {job.id} waits" + (f" ({job.reason})" if job.reason else "")
        return State(Word.PENDING, _join(waits, reason), code=Code.PENDING, fix=_advice(job))
    if newest is not None and has_ended:
        return _ended(left.word, verdict, newest, job)
    if (life and life.lives) or (job is not None and job.state in ALIVE):
        starts = has_events and progress.attempt < (newest.number if newest else 1)
        return State(Word.RUNNING, "starting" if starts else "")
    if newest is not None or progress.num_events:
        its_job = job if newest is None or newest.job_id else None
        return _silent(left.word, life, its_job, progress, newest is not None, now)
    if job is not None:
        return _by_job(job, "before it left anything")
    if unclear is None:
        return State(Word.NOT_STARTED, code=Code.NOT_STARTED)
    if unclear.state == REFUSED:
        return State(Word.NOT_STARTED, unclear.reason, is_over=True, code=Code.NOT_STARTED)
    return State(Word.UNKNOWN, f"job {unclear.id}: {unclear.reason}")


def _by_job(job: QueueEntry, when: str = "") -> State:
    """A run without a recorded end, from Slurm's state of its job."""
    why = f"job {job.id} is {job.state}" + (f" ({job.reason})" if job.reason else "")
    word = Word.CANCELLED if job.state == "CANCELLED" else Word.UNKNOWN if job.state == "COMPLETED" else Word.FAILED
    code = BY_JOB.get(job.state, Code.UNKNOWN)
    return State(
        word, f"{why}, {when}" if when else why, is_over=True, code=code, fix=_advice(job) or FIXES.get(code, "")
    )


def _advice(job: QueueEntry) -> str:
    return ADVICE.get(job.reason.split(",")[0].strip("()"), "")


def _ended(word: Word, verdict: RunVerdict | None, newest: Attempt, job: QueueEntry | None) -> State:
    """The newest attempt has been concluded, and it was not the last of a finished run."""
    reason = verdict.reason if verdict else ""
    if verdict and verdict.action is Action.REQUEUE and newest.job_id:
        if job is None:
            return State(
                Word.UNKNOWN, _join(reason, "its job was to continue, but its scheduler cannot be asked from here")
            )
        if job.state in ALIVE:
            return State(Word.PENDING, _join(reason, f"job {job.id} is to begin again"))
    over = job is None or job.state not in ALIVE
    return State(word, reason or "an attempt has ended without saying how", over)


def _silent(
    word: Word, life: Life | None, job: QueueEntry | None, progress: Progress, has_attempts: bool, now: float
) -> State:
    """The newest attempt has no conclusion, and no process is known to be at work."""
    if word is not Word.UNKNOWN:
        return State(word, "its ranks ended in order", is_over=True)
    if job is not None and job.state != "COMPLETED":
        return _by_job(job)
    if life is not None:
        gone = "is gone" if life.sure else f"has given no sign of life for {STALE_S:.0f} s"
        return State(Word.UNKNOWN, f"{life.name} {gone}, and it is not known how it ended", is_over=life.sure)
    if not has_attempts and progress.last_time is not None and now - progress.last_time < FRESH_S:
        return State(Word.RUNNING)
    return State(Word.UNKNOWN, "no process works on it, and it is not known how it ended", is_over=True)


def _join(*parts: str) -> str:
    return "; ".join(part for part in parts if part)


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
