"""Where a run stands: what Slurm says of its jobs, and what the run folder knows. Neither is guessed from the other."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hpctrain.errors import HpctrainError
from hpctrain.launch.engines.slurm import client
from hpctrain.launch.engines.slurm.submission import submissions
from hpctrain.run import Attempt, RunSnapshot, RunView
from hpctrain.run.events import Train
from hpctrain.run.folder import RunDir
from hpctrain.run.job import ALIVE, QueueEntry
from hpctrain.system import foreign_text

UNKNOWN = "UNKNOWN"
"""Neither the queue nor accounting knows the job any more: it may have ended in any way."""


@dataclass(frozen=True)
class Progress:
    """What the run folder knows."""

    attempt: int | None
    step: int | None
    steps: int | None
    """Steps of the whole run, where the run has said so."""
    checkpoint: int | None
    """Step of the newest checkpoint."""
    loss: float | None
    samples_per_s: float | None
    left_s: float | None
    """Seconds to the end of the run at the last measured rate."""
    silent_s: float | None
    """Seconds since the last event."""
    straggler: str | None
    ended: str | None
    """How the last attempt ended, where it said so."""
    stop_requested_by: str | None
    left_out: str | None = None
    """Events that were left out, being none of the run's own."""


@dataclass(frozen=True)
class RunStatus:
    """One run: an array has one for each element."""

    run: str
    job: str | None
    state: str
    """Slurm's word, UNKNOWN for a purged job, or 'not submitted'."""
    reason: str
    nodes: str
    elapsed: str
    time_left: str
    progress: Progress

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def of_runs(runs: Sequence[RunDir]) -> list[RunStatus]:
    """The status of run folders, with one question to Slurm; where it does not answer, what the folders know."""
    try:
        entries = known([jobs_of(run) for run in runs])
    except HpctrainError as error:
        return [of_folder(run, error.what) for run in runs]
    return [of_run(run, entries) for run in runs]


def of_run(run: RunDir, entries: Mapping[str, QueueEntry]) -> RunStatus:
    """The status of one run folder, from its newest job."""
    jobs = jobs_of(run)
    entry = newest(jobs, entries)
    return RunStatus(
        run=str(run.path),
        job=jobs[-1] if jobs and entry is None else entry.id if entry else None,
        state=entry.state if entry else UNKNOWN if jobs else "not submitted",
        reason=entry.reason if entry else "the queue has forgotten the job" if jobs else "",
        nodes=entry.nodes if entry else "",
        elapsed=entry.elapsed if entry else "",
        time_left=entry.left if entry else "",
        progress=progress_of(run),
    )


def of_folder(run: RunDir, why: str) -> RunStatus:
    """The status of one run folder where Slurm cannot be asked."""
    jobs = jobs_of(run)
    state, job = (UNKNOWN, jobs[-1]) if jobs else ("not submitted", None)
    return RunStatus(str(run.path), job, state, why if jobs else "", "", "", "", progress_of(run))


def jobs_of(run: RunDir) -> list[str]:
    """Numbers of a run's jobs, oldest first."""
    return [each.job for each in submissions(run)]


def known(runs: Sequence[Sequence[str]]) -> dict[str, QueueEntry]:
    """What Slurm knows of the jobs of each run: the queue, and accounting of what the queue has forgotten."""
    found = {entry.id: entry for entry in client.queue([job for jobs in runs for job in jobs])}
    forgotten = [jobs[-1] for jobs in runs if jobs and not any(job in found for job in jobs)]
    return found | {entry.id: entry for entry in client.accounted(forgotten)}


def newest(jobs: Sequence[str], entries: Mapping[str, QueueEntry]) -> QueueEntry | None:
    """Of a run's jobs the one that is alive, else the last one that Slurm knows."""
    found = [entries[job] for job in jobs if job in entries]
    return next((entry for entry in found if entry.state in ALIVE), found[-1] if found else None)


def progress_of(run: RunDir) -> Progress:
    """What the run folder knows now."""
    return progress(RunView(run.path).snapshot(), time.time())


def progress(found: RunSnapshot, now: float) -> Progress:
    """What the run folder knows; pure."""
    newest, made = found.newest, found.progress
    train = made.newest(Train) or Train(step=0)
    slow = list(made.findings.values())
    return Progress(
        attempt=newest.number if newest else None,
        step=made.step,
        steps=made.total_steps,
        checkpoint=found.checkpoint_step,
        loss=train.loss,
        samples_per_s=train.samples_per_s,
        left_s=made.left_s,
        silent_s=now - made.last_time if made.last_time is not None else None,
        straggler=slow[-1].text if slow else None,
        ended=_ending(newest) if newest else None,
        stop_requested_by=found.stop_requested_by,
        left_out=found.left_out or None,
    )


def _ending(attempt: Attempt) -> str | None:
    if attempt.ended is None:
        return None
    return (attempt.verdict.reason if attempt.verdict else "") or "ended"


def lines(statuses: Sequence[RunStatus]) -> list[str]:
    """A short paragraph for each run."""
    text = []
    for status in statuses:
        made = status.progress
        text.append(f"{status.run}")
        job = f"job {status.job} {status.state}" if status.job else status.state
        text.append(
            "  "
            + _join(
                [job, status.reason, status.nodes, _pair(status.elapsed, "elapsed"), _pair(status.time_left, "left")]
            )
        )
        done = (
            f"step {made.step}" + (f" of {made.steps}" if made.steps else "")
            if made.step is not None
            else "no step yet"
        )
        rate = f"{made.samples_per_s:.4g} samples/s" if made.samples_per_s else ""
        ahead = f"about {duration(made.left_s)} to go" if made.left_s is not None and not made.ended else ""
        saved = f"checkpoint at {made.checkpoint}" if made.checkpoint is not None else ""
        text.append(
            "  " + _join([f"attempt {made.attempt}" if made.attempt else "no attempt yet", done, rate, ahead, saved])
        )
        if made.ended:
            text.append(f"  last attempt: {made.ended}")
        if made.straggler:
            text.append(f"  slow: {made.straggler}")
        if made.stop_requested_by:
            text.append(f"  asked to stop by {made.stop_requested_by}")
        if made.left_out:
            text.append(f"  events: {made.left_out}")
    return [indent(each) for each in text]


def indent(text: str) -> str:
    """One line, as far to the right as the text is."""
    return text[: len(text) - len(text.lstrip(" "))] + foreign_text.line(text.strip(" "))


def duration(seconds: float) -> str:
    """1:02:03."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def _join(parts: Sequence[str]) -> str:
    return " · ".join(part for part in parts if part and part != "N/A")


def _pair(value: str, name: str) -> str:
    return f"{value} {name}" if value and value not in ("INVALID", "N/A", "NOT_SET") else ""
