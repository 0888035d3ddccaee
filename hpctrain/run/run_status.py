"""The state of a run at one moment: pending, running or ended, from its files, processes and scheduler. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from hpctrain.errors import Code, ExitCode
from hpctrain.run.attempts import Attempt
from hpctrain.run.events import RankDevice, RunFinished, RunStarted
from hpctrain.run.last_words import AttemptWords
from hpctrain.run.live_lock import STALE_S
from hpctrain.run.progress import Progress
from hpctrain.run.time_account import TimeAccount
from hpctrain.run.verdict import FIXES, Action, RunVerdict

ALIVE = (
    *("PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED"),
    *("STOPPED", "REQUEUED", "REQUEUE_HOLD", "RESIZING", "STAGE_OUT"),
)
"""States of jobs that may still use the run folder."""
UNKNOWN = "UNKNOWN"
"""State of jobs that the scheduler does not report or has forgotten; how they ended is unknown."""
REFUSED = "REFUSED"
"""State of a submission that the scheduler refused."""

ADVICE = {
    "DependencyNeverSatisfied": "a job that it waits for failed: cancel it, and submit it without --after",
    "Dependency": "it starts when the jobs that it waits for have succeeded",
    "JobHeldUser": "it is held: scontrol release lets it start",
    "JobHeldAdmin": "an administrator holds it: ask the site",
    "BeginTime": "it starts at launch.slurm.begin, or some time after a requeue",
    "PartitionNodeLimit": "the partition does not allow that many nodes: lower launch.nodes, or take another partition",
    "PartitionTimeLimit": "the partition does not allow that much time: lower launch.slurm.time",
    "ReqNodeNotAvail": "nodes that it needs are down or reserved: sinfo -R shows why",
    "PartitionDown": "the partition is closed: wait, or take another one that sinfo shows as up",
    "PartitionInactive": "the partition is closed: wait, or take another one that sinfo shows as up",
    "JobArrayTaskLimit": "it starts when another element of its array ends (--at-once)",
    "REQUEUE_HOLD": "it is held: scontrol release lets it start",
    "SUSPENDED": "it continues when Slurm or an administrator resumes it (scontrol resume)",
    "STOPPED": "it continues when it gets the signal SIGCONT",
}
"""Advice by Slurm's state or reason, for those that keep jobs waiting longest."""


@dataclass(frozen=True)
class QueueEntry:
    """A job or an array element as the scheduler reports it, in Slurm's words."""

    id: str
    """123, or 120_4 for element 4 of array 120."""
    state: str
    """PENDING, RUNNING, COMPLETED, FAILED, CANCELLED, TIMEOUT, NODE_FAIL, PREEMPTED, OUT_OF_MEMORY ..."""
    reason: str = ""
    """Why it is waiting, or why it ended."""
    elapsed: str = ""
    left: str = ""
    limit: str = ""
    nodes: str = ""
    start: str = ""
    note: str = ""
    """What the job said last, if it ended before the run began; the fix of a refused submission."""


WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "CONFIGURING", "SUSPENDED", "STOPPED")
"""States of jobs that have not begun, or are paused."""
ORDERLY = (ExitCode.DONE, ExitCode.STOPPED)
"""Exit codes of attempts that ended as planned or on request."""
FRESH_S = 60.0
"""Age of the newest event up to which a folder that holds only events counts as that of a live run."""


class Word(StrEnum):
    """State of a run in one word."""

    NOT_STARTED = "not started"
    PENDING = "pending"
    """Waiting in the queue, to start or to continue."""
    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"
    """Stopped on request, with a checkpoint; the same command resumes it."""
    FAILED = "failed"
    CANCELLED = "cancelled"
    """The job was cancelled before the run could record an end."""
    UNKNOWN = "unknown"
    """No process is known to be working on it, and no record says how it ended."""


@dataclass(frozen=True)
class RunState:
    """State of a run, and why."""

    word: Word
    why: str = ""
    is_over: bool = False
    """Whether nothing more will happen unless someone acts."""
    code: Code = Code.UNKNOWN
    """The reason as a code, if the job's state gives one."""
    fix: str = ""
    """What to do, if the job's state says it."""


BY_JOB = {
    **dict.fromkeys(("TIMEOUT", "DEADLINE"), Code.TIME_LIMIT),
    **dict.fromkeys(("NODE_FAIL", "BOOT_FAIL"), Code.NODE),
    "OUT_OF_MEMORY": Code.OUT_OF_MEMORY,
    "CANCELLED": Code.CANCELLED,
    "PREEMPTED": Code.KILLED,
}
"""Code by a job's final state, for runs that could not record how they ended."""


@dataclass(frozen=True)
class Life:
    """The process that holds the run folder."""

    lives: bool
    sure: bool
    """Whether ``lives`` is certain: a process of this machine can be checked; others are judged by signs of life."""
    name: str
    """Process and host, as text."""


class Outcome(StrEnum):
    """The state of a run from its files alone, whether or not a process is alive."""

    COMPLETED = "completed"
    EARLY = "early_stop"
    DONE = "done"
    """Finished according to the supervisor; the ranks wrote no event of their end, as with plain commands."""
    STOPPED_BY_RANKS = "stop_requested"
    STOPPED = "stop"
    """Stopped according to the supervisor."""
    FAILED = "failed"
    RUNNING = "running"
    """No end is recorded: the run is running, or was killed."""
    UNKNOWN = "unknown"

    @property
    def word(self) -> Word:
        """The state as a Word, whichever process recorded it."""
        return WORDS.get(self, Word.UNKNOWN)


WORDS = {
    **dict.fromkeys((Outcome.COMPLETED, Outcome.EARLY, Outcome.DONE), Word.FINISHED),
    **dict.fromkeys((Outcome.STOPPED_BY_RANKS, Outcome.STOPPED), Word.STOPPED),
    Outcome.FAILED: Word.FAILED,
}


def outcome(attempts: Sequence[Attempt], started: RunStarted | None, finished: RunFinished | None) -> Outcome:
    """Returns the state of a run from its files.

    Args:
        attempts: attempts in run.json, oldest first.
        started: the newest RunStarted event.
        finished: the newest RunFinished event.
    """
    newest = started.attempt if started else 0
    if attempts:
        newest = attempts[-1].number
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
) -> RunState:
    """Returns the state of a run.

    Args:
        attempts: attempts in run.json, oldest first.
        progress: summary of its events.
        life: the process that holds the run folder, if any.
        job: its live or newest job, perhaps UNKNOWN or REFUSED; None without one.
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
        return RunState(left.word, reason or left, is_over=True)
    if job is not None and job.state in WAITING:
        why = job.state if job.state in ADVICE else job.reason
        waits = f"job {job.id} waits" + (f" ({why})" if why else "")
        fix = ADVICE.get(why.split(",")[0].strip("()"), "")
        return RunState(Word.PENDING, _join(waits, reason), code=Code.PENDING, fix=fix)
    if newest is not None and has_ended:
        return _ended(left.word, verdict, newest, job)
    if life and not life.lives and job is not None and job.state == "RUNNING":
        what = f"job {job.id} runs, but {life.name} has given no sign of life for {STALE_S:.0f} s"
        return RunState(Word.UNKNOWN, what, fix=f"if it does not start again within minutes: scontrol requeue {job.id}")
    if (life and life.lives) or (job is not None and job.state in ALIVE):
        starts = has_events and progress.attempt < (newest.number if newest else 1)
        return RunState(Word.RUNNING, "starting" if starts else "")
    if newest is not None or progress.num_events:
        its_job = job if newest is None or newest.job_id else None
        return _silent(left.word, life, its_job, progress, newest is not None, now)
    if job is not None:
        return _by_job(job, "before it wrote anything")
    if unclear is None:
        return RunState(Word.NOT_STARTED, code=Code.NOT_STARTED)
    if unclear.state == REFUSED:
        return RunState(Word.NOT_STARTED, unclear.reason, is_over=True, code=Code.NOT_STARTED, fix=unclear.note)
    return RunState(Word.UNKNOWN, f"job {unclear.id}: {unclear.reason}")


def _by_job(job: QueueEntry, when: str = "") -> RunState:
    """Returns the state of a run without a recorded end, from the state of its job."""
    why = f"job {job.id} is {job.state}" + (f" ({job.reason})" if job.reason else "")
    word = {"CANCELLED": Word.CANCELLED, "COMPLETED": Word.UNKNOWN}.get(job.state, Word.FAILED)
    code = BY_JOB.get(job.state, Code.UNKNOWN)
    said = f": {job.note}" if job.note else ""
    why = f"{why}, {when}{said}" if when else why
    return RunState(word, why, is_over=True, code=code, fix=FIXES.get(code, ""))


def _ended(word: Word, verdict: RunVerdict | None, newest: Attempt, job: QueueEntry | None) -> RunState:
    """Returns the state of a run whose newest attempt has a recorded end but has not finished the run."""
    reason = verdict.reason if verdict else ""
    if verdict and verdict.action is Action.REQUEUE and newest.job_id:
        if job is None:
            return RunState(
                Word.UNKNOWN, _join(reason, "its job should continue, but its scheduler cannot be queried from here")
            )
        if job.state in ALIVE:
            return RunState(Word.PENDING, _join(reason, f"job {job.id} will start again"))
    over = job is None or job.state not in ALIVE
    return RunState(word, reason or "an attempt has ended without saying how", over)


def _silent(
    word: Word, life: Life | None, job: QueueEntry | None, progress: Progress, has_attempts: bool, now: float
) -> RunState:
    """Returns the state of a run whose newest attempt has no recorded end and no known live process."""
    if word is not Word.UNKNOWN:
        return RunState(word, "its ranks ended in order", is_over=True)
    if job is not None and job.state != "COMPLETED":
        return _by_job(job)
    if life is not None:
        gone = "is gone" if life.sure else f"has given no sign of life for {STALE_S:.0f} s"
        return RunState(Word.UNKNOWN, f"{life.name} {gone}, and it is not known how it ended", is_over=life.sure)
    if not has_attempts and progress.last_time is not None and now - progress.last_time < FRESH_S:
        return RunState(Word.RUNNING)
    return RunState(Word.UNKNOWN, "no process works on it, and it is not known how it ended", is_over=True)


def _join(*parts: str) -> str:
    return "; ".join(part for part in parts if part)


@dataclass(frozen=True)
class LiveRank:
    """A rank in the monitor's newest window; times are medians over its steps."""

    rank: int
    host: str
    busy_s: float
    wait_s: float
    excess: float
    """Busy time above the median of the other ranks; 0.2 is 20%."""
    cost: float = 0.0
    """Fraction of the window that the run would save without this rank's delay."""


@dataclass(frozen=True)
class LiveWindow:
    """The monitor's newest window."""

    attempt: int | None = None
    step: int | None = None
    """Last step of the window."""
    num_ranks: int | None = None
    ranks: tuple[LiveRank, ...] = ()
    """Ranks in order; if there are very many, only the busiest."""
    verdicts: tuple[str, ...] | None = None
    """The monitor's current findings, including suspicions, as sentences; None if not given."""
    dropped_windows: int = 0
    devices: tuple[RankDevice, ...] = ()
    """GPUs of these ranks."""


@dataclass(frozen=True)
class RunSnapshot:
    """A run at one moment; fields that its folder does not give are None or empty."""

    path: Path
    """The run folder."""
    id: str | None
    config: Mapping[str, Any]
    """The resolved run file, run.yaml."""
    attempts: tuple[Attempt, ...]
    """Attempts, oldest first."""
    progress: Progress
    """Summary of the events so far."""
    life: Life | None = None
    """The process that holds the run folder."""
    live: LiveWindow | None = None
    """The monitor's newest window."""
    left_out: str = ""
    """A sentence about events that were left out because they are not valid."""
    is_behind: bool = False
    """Whether there are events not read yet: this is the state before them."""
    stop_requested_by: str | None = None
    """Who asked the run to stop; not set by ``RunView.look``."""
    checkpoint_step: int | None = None
    """Step of the newest checkpoint; not set by ``RunView.look``."""
    words: Mapping[int, AttemptWords] = field(default_factory=dict)
    """Last words by attempt; not set by ``RunView.look``."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """The training data: ``fingerprint``, ``samples`` (number), ``sources`` (tables)."""
    reducer: Mapping[str, Any] = field(default_factory=dict)
    """What ``reduce.kind: auto`` chose: ``reducer`` (name), ``seconds`` (of a trial step, by name)."""

    @property
    def name(self) -> str:
        """The run's name; by default that of its folder."""
        return str(self.config.get("name") or self.path.name)

    @property
    def newest(self) -> Attempt | None:
        """The newest attempt."""
        return self.attempts[-1] if self.attempts else None

    @property
    def unsaved_steps(self) -> int | None:
        """Steps that a failure now would lose, as far as events say; None if no checkpoint is known."""
        step, saved = self.progress.step, self.checkpoint_step
        return max(step - saved, 0) if step is not None and saved is not None else None

    @property
    def outcome(self) -> Outcome:
        """The state of the run from its files; ``state`` also considers live processes and jobs."""
        return outcome(self.attempts, self.progress.newest(RunStarted), self.progress.newest(RunFinished))

    @property
    def account(self) -> TimeAccount:
        """Where the run's time has gone so far."""
        return self.progress.sums.account(self.attempts)

    def state(self, now: float, job: QueueEntry | None = None) -> RunState:
        """Returns the state of the run.

        Args:
            now: Unix seconds.
            job: its live or newest job; None if there is none.
        """
        is_command = bool((self.config.get("launch") or {}).get("command"))
        return of_run(self.attempts, self.progress, self.life, job, now, has_events=not is_command)
