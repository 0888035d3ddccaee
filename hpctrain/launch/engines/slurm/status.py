"""How runs stand: the one place that asks Slurm about their jobs and joins its answer with what their folders tell."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpctrain.errors import HpctrainError
from hpctrain.launch.engines.slurm import client
from hpctrain.launch.engines.slurm.submission import SCRIPT, refusal, submissions
from hpctrain.run import Attempt, RunSnapshot, RunView
from hpctrain.run.events import Train
from hpctrain.run.folder import RunDir
from hpctrain.run.job import ALIVE, REFUSED, UNKNOWN, QueueEntry
from hpctrain.run.which import elements_of
from hpctrain.system import foreign_text


@dataclass(frozen=True)
class Progress:
    """What the run folder knows."""

    attempt: int | None
    step: int | None
    steps: int | None
    """Steps of the whole run, if the run has said so."""
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
    """How the last attempt ended, if it said so."""
    stop_requested_by: str | None
    plan: str | None = None
    """How the ranks share out the model."""
    failing_saves: str | None = None
    """That checkpoints cannot be written, as a sentence."""
    left_out: str | None = None
    """Events that were left out, being none of the run's own."""


@dataclass(frozen=True)
class RunStatus:
    """One run: an array has one for each element."""

    run: str
    state: str
    """How the run stands, as ``hpctrain watch`` has it: pending, running, finished ..."""
    why: str
    job: str | None
    job_state: str | None
    """Slurm's word; UNKNOWN for a job of which it has not told, or that it has forgotten."""
    reason: str
    """Slurm's, for which the job waits or ended."""
    nodes: str
    elapsed: str
    time_left: str
    progress: Progress

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Answer:
    """What Slurm says of jobs."""

    entries: Mapping[str, QueueEntry]
    """By job; those that it has forgotten are missing."""
    silence: str = ""
    """Why it has not told; empty if it has."""

    def job_of(self, run: RunDir) -> QueueEntry | None:
        """The job that a run stands by: the living one, else the newest that Slurm knows.

        One of which Slurm has not told is UNKNOWN; where nothing could be submitted it is REFUSED. None if nobody has
        submitted anything.
        """
        jobs = jobs_of(run)
        if not jobs:
            refused = refusal(run)
            return _entry("", REFUSED, refused) if refused else None
        found = [self.entries[job] for job in jobs if job in self.entries]
        if found:
            return next((entry for entry in found if entry.state in ALIVE), found[-1])
        array = jobs[-1].partition("_")[0]
        others = any(job.startswith(f"{array}_") for job in self.entries)
        if others and "_" in jobs[-1] and not run.has_begun:
            # Slurm keeps no record of an element that is cancelled while it waits.
            return _entry(jobs[-1], "CANCELLED", "taken out of the queue")
        return _entry(jobs[-1], UNKNOWN, self.silence or "Slurm has forgotten it")


def _entry(job: str, state: str, reason: str) -> QueueEntry:
    return QueueEntry(job, state, reason, "", "", "", "", "")


def ask(runs: Sequence[RunDir]) -> Answer:
    """One question to Slurm about the jobs of all these runs, and one to accounting about those that it has forgotten.

    Takes seconds if the controller is down, and never fails.
    """
    jobs = [jobs_of(run) for run in runs]
    arrays = dict.fromkeys(job.partition("_")[0] for each in jobs for job in each)  # one word for thousands of elements
    try:
        found = {entry.id: entry for entry in client.queue(list(arrays), client.ANSWER_S)}
    except HpctrainError as error:
        return Answer({}, error.what)
    forgotten = [each[-1] for each in jobs if each and not any(job in found for job in each)]
    return Answer(found | {entry.id: entry for entry in client.accounted(forgotten, client.ANSWER_S)})


def of_runs(runs: Sequence[RunDir]) -> list[RunStatus]:
    """The status of run folders; if Slurm does not answer, what the folders tell."""
    answer = ask(runs)
    return [of_run(run, answer) for run in runs]


def of_run(run: RunDir, answer: Answer) -> RunStatus:
    """The status of one run folder."""
    entry, now, found = answer.job_of(run), time.time(), RunView(run.path).snapshot()
    state = found.state(now, entry)
    job = entry or _entry("", "", "")
    return RunStatus(
        run=str(run.path),
        state=state.word.value,
        why=state.why,
        job=job.id or None,
        job_state=job.state or None,
        reason=job.reason,
        nodes=job.nodes,
        elapsed=job.elapsed,
        time_left=job.left,
        progress=progress(found, now),
    )


def jobs_of(run: RunDir) -> list[str]:
    """Numbers of a run's jobs, oldest first."""
    return [each.job for each in submissions(run)]


def own_runs(here: Path) -> list[RunDir]:
    """The user's runs: those below ``here``/runs, and those whose jobs Slurm knows, wherever they lie."""
    folders = sorted((here / "runs").glob("*/"))
    found = {folder: RunDir(folder) for folder in folders if RunDir(folder).run_yaml.is_file()}
    try:
        scripts = client.own_scripts()
    except HpctrainError:
        scripts = {}
    for folder in (Path(command).parent for command in scripts.values() if Path(command).name == SCRIPT):
        if RunDir(folder).run_yaml.is_file():
            found.setdefault(folder, RunDir(folder))
    return [run for array in found.values() for run in elements_of(array) or [array]]


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
        plan=(newest.plan if newest else "") or None,
        stop_requested_by=found.stop_requested_by,
        left_out=found.left_out or None,
        failing_saves=made.failing_saves,
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
        text.append("  " + status.state + (f": {status.why}" if status.why else ""))
        if status.job:
            # How the job of a run that has told its end ended by itself is of no use to people.
            job = f"job {status.job}" + ("" if made.ended else f" {status.job_state}")
            times = [_pair(status.elapsed, "elapsed"), _pair(status.time_left, "left") if not made.ended else ""]
            untold = status.reason if status.job_state == UNKNOWN and status.reason not in status.why else ""
            text.append("  " + _join([job, untold if not made.ended else "", status.nodes, *times]))
        rate = f"{made.samples_per_s:.4g} samples/s" if made.samples_per_s else ""
        ahead = f"about {duration(made.left_s)} to go" if made.left_s is not None and not made.ended else ""
        saved = f"checkpoint at {made.checkpoint}" if made.checkpoint is not None else ""
        begun = f"attempt {made.attempt}" if made.attempt else "no attempt yet"
        text.append("  " + _join([begun, made.plan or "", _step(made), rate, ahead, saved]))
        if made.ended and made.ended not in status.why:
            text.append(f"  last attempt: {made.ended}")
        if made.failing_saves:
            text.append(f"  NOT SAVED: {made.failing_saves}")
        if made.straggler:
            text.append(f"  slow: {made.straggler}")
        if made.stop_requested_by:
            text.append(f"  asked to stop by {made.stop_requested_by}")
        if made.left_out:
            text.append(f"  events: {made.left_out}")
    return [indent(each) for each in text]


def table(statuses: Sequence[RunStatus]) -> list[str]:
    """A line for each run."""
    rows = [
        (status.state, status.job or "-", _step(status.progress), foreign_text.line(status.run)) for status in statuses
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)] if rows else []
    return ["  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]) for row in rows]


def _step(made: Progress) -> str:
    if made.step is None:
        return "no step yet"
    return f"step {made.step}" + (f" of {made.steps}" if made.steps else "")


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
