"""Whether a run waits, runs or has ended, from what was written down, who lives, and what Slurm says. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from hpctrain.run.job import ALIVE, QueueEntry
from hpctrain.run.live_lock import STALE_S
from hpctrain.run.progress import Digest, outcome

WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "CONFIGURING")
"""States of jobs that have not begun."""
FRESH_S = 60.0
"""Silence up to which a folder whose events are all there is counts as that of a live run."""


class Word(StrEnum):
    """How a run stands."""

    NOT_STARTED = "not started"
    PENDING = "pending"
    """Waits for Slurm, for the first time or to go on."""
    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"
    """On request, with a checkpoint: the same command goes on."""
    FAILED = "failed"
    UNKNOWN = "unknown"
    """Nobody works on it as far as can be told, and nobody has said how it ended."""


@dataclass(frozen=True)
class State:
    """How a run stands, and why."""

    word: Word
    why: str = ""
    is_over: bool = False
    """Nothing more will happen unless somebody acts."""


@dataclass(frozen=True)
class Life:
    """The process that uses the run folder."""

    lives: bool
    sure: bool
    """It is or was a process of this machine: whether it lives is no guess from its last sign of life."""
    name: str
    """Process and host."""


ENDINGS = {
    "completed": Word.FINISHED,
    "early_stop": Word.FINISHED,
    "done": Word.FINISHED,
    "stop_requested": Word.STOPPED,
    "stop": Word.STOPPED,
    "failed": Word.FAILED,
}


def of_run(
    attempts: Sequence[Mapping[str, Any]],
    digest: Digest,
    life: Life | None,
    job: QueueEntry | None,
    now: float,
    has_events: bool = True,
) -> State:
    """How a run stands.

    Args:
        attempts: of run.json, oldest first.
        digest: its events.
        life: who holds the run folder; None where nobody does.
        job: its living or newest job; None without Slurm, or where Slurm knows none.
        now: Unix seconds.
        has_events: whether its ranks write events; plain commands do not.
    """
    newest = attempts[-1] if attempts else {}
    verdict = dict(newest.get("verdict") or {})
    left = outcome(attempts, digest.newest.get("run_started", {}), digest.newest.get("run_finished", {}))
    word = ENDINGS.get(left, Word.UNKNOWN)
    reason = str(verdict.get("reason") or "")
    if word is Word.FINISHED and (newest.get("ended") or not (life and life.lives)):
        return State(word, reason or left, is_over=True)
    if job is not None and job.state in WAITING:
        return State(Word.PENDING, _join(f"job {job.id}: {job.reason or job.state.lower()}", reason))
    if newest.get("ended"):
        return _ended(word, reason, verdict, newest, job)
    if (life and life.lives) or (job is not None and job.state in ALIVE):
        starts = has_events and digest.attempt < newest.get("attempt", 1)
        return State(Word.RUNNING, "starting" if starts else "")
    if attempts or digest.num_events:
        return _silent(word, life, job if newest.get("job_id") or not attempts else None, digest, bool(attempts), now)
    if job is not None:
        return State(Word.UNKNOWN, f"job {job.id} {job.state} and left nothing", is_over=True)
    return State(Word.NOT_STARTED)


def _ended(
    word: Word, reason: str, verdict: Mapping[str, Any], newest: Mapping[str, Any], job: QueueEntry | None
) -> State:
    """The newest attempt has been concluded, and it was not the last of a finished run."""
    if verdict.get("action") == "requeue" and newest.get("job_id"):
        if job is None:
            return State(Word.UNKNOWN, _join(reason, "its job was to go on, but Slurm cannot be asked from here"))
        if job.state in ALIVE:
            return State(Word.PENDING, _join(reason, f"job {job.id} is to begin anew"))
    over = job is None or job.state not in ALIVE
    return State(word, reason or "an attempt has ended and nobody has said how", over)


def _silent(
    word: Word, life: Life | None, job: QueueEntry | None, digest: Digest, has_attempts: bool, now: float
) -> State:
    """Nobody has concluded the newest attempt, and nobody is known to be at work."""
    if word is not Word.UNKNOWN:
        return State(word, "its ranks ended in order", is_over=True)
    if job is not None and job.state != "COMPLETED":
        return State(Word.FAILED, f"job {job.id} {job.state}" + (f", {job.reason}" if job.reason else ""), is_over=True)
    if life is not None:
        gone = "is gone" if life.sure else f"has given no sign of life for {STALE_S:.0f} s"
        return State(Word.UNKNOWN, f"{life.name} {gone}, and nobody has said how it ended", is_over=life.sure)
    if not has_attempts and digest.last_time is not None and now - digest.last_time < FRESH_S:
        return State(Word.RUNNING)
    return State(Word.UNKNOWN, "nobody works on it, and nobody has said how it ended", is_over=True)


def _join(*parts: str) -> str:
    return "; ".join(part for part in parts if part)
