"""The status of runs: the one place that combines schedulers' answers about jobs with the run folders' content."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpctrain.errors import HpctrainError
from hpctrain.launch.engines import schedulers
from hpctrain.launch.engines.jobs import SCRIPT, refusal, submissions
from hpctrain.launch.engines.slurm import client
from hpctrain.run.attempts import Attempt, Attempts
from hpctrain.run.events import Train
from hpctrain.run.folder import RunDir
from hpctrain.run.logs import said_last
from hpctrain.run.progress import Progress
from hpctrain.run.resolve_run import elements_of
from hpctrain.run.run_status import ALIVE, REFUSED, UNKNOWN, QueueEntry, RunSnapshot, RunState, Word
from hpctrain.run.run_view import RunView
from hpctrain.system import foreign_text
from hpctrain.system.json_shape import is_number
from hpctrain.system.quantities import duration, number

RECOVERIES = 3
"""Number of newest recoveries shown."""


@dataclass(frozen=True)
class RunStatus:
    """Status of one run, or of one element of an array."""

    found: RunSnapshot
    """Content of the run folder."""
    state: RunState
    """State of the run, as in ``hpctrain watch``."""
    job: QueueEntry
    """The run's job; UNKNOWN if the scheduler does not report it or has forgotten it, empty fields if there is none."""
    time: float
    """Unix seconds."""

    @property
    def ended(self) -> str | None:
        """How the last attempt ended; None if it has not, or did not record it."""
        newest = self.found.newest
        if newest is None or newest.ended is None:
            return None
        return (newest.verdict.reason if newest.verdict else "") or "ended"

    @property
    def straggler(self) -> str | None:
        """The monitor's newest finding that is not over, as a sentence."""
        slow = list(self.found.progress.findings.values())
        return slow[-1].text if slow else None

    def plain(self) -> dict[str, Any]:
        """Returns the status for JSON."""
        found = self.found
        made = self.found.progress
        job = self.job
        train = made.newest(Train) or Train(step=0)
        return {
            "run": str(found.path),
            "state": self.state.word.value,
            "why": self.state.why,
            "job": job.id or None,
            "job_state": job.state or None,
            "reason": job.reason,
            "nodes": job.nodes,
            "elapsed": job.elapsed,
            "time_left": job.left,
            "progress": {
                "attempt": found.newest.number if found.newest else None,
                "step": made.step,
                "steps": made.total_steps,
                "checkpoint": found.checkpoint_step,
                "unsaved_steps": found.unsaved_steps,
                "loss": train.loss,
                "learning_rate": train.learning_rate,
                "metrics": {name: value for name, value in train.more.items() if is_number(value)},
                "samples_per_s": train.samples_per_s,
                "tokens_per_s": train.tokens_per_s,
                "left_s": made.left_s,
                "silent_s": self.time - made.last_time if made.last_time is not None else None,
                "straggler": self.straggler,
                "ended": self.ended,
                "stop_requested_by": found.stop_requested_by,
                "plan": (found.newest.plan if found.newest else "") or None,
                "recoveries": [event.text for event in made.sums.recoveries],
                "account": vars(found.account),
                "failing_saves": made.failing_saves,
                "store_away": made.store_away,
                "left_out": found.left_out or None,
            },
        }


@dataclass(frozen=True)
class Answer:
    """What schedulers report about jobs."""

    entries: Mapping[str, QueueEntry]
    """Entries by job; forgotten jobs are missing."""
    silence: str = ""
    """Why a scheduler did not answer; empty if all did."""

    def job_of(self, run: RunDir) -> QueueEntry | None:
        """Returns the job of a run: the live one, else the newest that the scheduler knows.

        UNKNOWN if the scheduler reports none of its jobs; REFUSED if the submission was refused; None if nothing was
        submitted.
        """
        jobs = jobs_of(run)
        if not jobs:
            own = self.entries.get(own_job(run))
            if own and own.state not in ALIVE:
                return own
            refused, _, fix = refusal(run).partition("\n")
            return QueueEntry("", REFUSED, refused, note=fix) if refused else None
        found = [self.entries[job] for job in jobs if job in self.entries]
        if found:
            entry = next((entry for entry in found if entry.state in ALIVE), found[-1])
            ended = entry.state not in ALIVE and not run.has_begun
            return replace(entry, note=said_last(run, entry.id) or comment(run, entry)) if ended else entry
        array = jobs[-1].partition("_")[0]
        others = any(job.startswith(f"{array}_") for job in self.entries)
        if others and "_" in jobs[-1] and not run.has_begun:
            # Slurm keeps no record of an array element that was cancelled while waiting.
            return QueueEntry(jobs[-1], "CANCELLED", "taken out of the queue")
        return QueueEntry(jobs[-1], UNKNOWN, self.silence or f"{schedulers.of_run(run).title} has forgotten it")


def comment(run: RunDir, entry: QueueEntry) -> str:
    """Returns the comment of a Slurm job, in which a supervisor that cannot write its log says why; else empty."""
    with contextlib.suppress(HpctrainError):
        if schedulers.engine_of(run) == "slurm" and (origin := client.origin(entry.id)):
            return origin.comment
    return ""


def ask(runs: Sequence[RunDir]) -> Answer:
    """Asks each scheduler once about its jobs of all these runs.

    Never fails; takes seconds per scheduler that is down.
    """
    found: dict[str, QueueEntry] = {}
    silence = ""
    engines = {run: schedulers.engine_of(run) for run in runs}
    for engine in dict.fromkeys(engines.values()):
        jobs = [jobs_of(run) or list(filter(None, [own_job(run)])) for run in runs if engines[run] == engine]
        try:
            found |= schedulers.SCHEDULERS[engine].states(jobs, client.ANSWER_S, ended=True)
        except HpctrainError as error:
            silence = error.what
    return Answer(found, silence)


def of_runs(runs: Sequence[RunDir]) -> list[RunStatus]:
    """Returns the status of run folders; from the folders alone if a scheduler does not answer."""
    answer = ask(runs)
    return [of_run(run, answer) for run in runs]


def of_run(run: RunDir, answer: Answer) -> RunStatus:
    """Returns the status of one run folder."""
    entry = answer.job_of(run)
    now = time.time()
    found = RunView(run.path).snapshot()
    return RunStatus(found, found.state(now, entry), entry or QueueEntry("", ""), now)


def jobs_of(run: RunDir) -> list[str]:
    """Returns the run's jobs with the scheduler of the newest one, oldest first."""
    jobs = [each.job for each in submissions(run, schedulers.engine_of(run))]
    with contextlib.suppress(HpctrainError):
        if not jobs and not run.has_begun:
            return [*schedulers.of_run(run).unrecorded([run], client.ANSWER_S)[0]]
    return jobs


def own_job(run: RunDir) -> str:
    """Returns the job in which a user's own launcher started the newest attempt; empty if there is none."""
    *_, newest = [Attempt(), *Attempts(run).all()]
    return newest.job_id or ""


def own_runs(here: Path) -> list[RunDir]:
    """Finds the user's runs: those in ``here``/runs, and those of jobs in Slurm's queue, wherever their folders are."""
    folders = sorted((here / "runs").glob("*/"))
    found = {folder: RunDir(folder) for folder in folders if RunDir(folder).run_yaml.is_file()}
    try:
        scripts = client.own_scripts()
    except HpctrainError:
        scripts = {}
    for folder in (Path(command).parent for _, command in scripts.values() if Path(command).name == SCRIPT):
        if RunDir(folder).run_yaml.is_file():
            found.setdefault(folder, RunDir(folder))
    return [run for array in found.values() for run in elements_of(array) or [array]]


def lines(statuses: Sequence[RunStatus]) -> list[str]:
    """Returns the lines of a short paragraph for each run."""
    return [indent(line) for status in statuses for line in _paragraph(status)]


def _paragraph(status: RunStatus) -> Iterator[str]:
    found = status.found
    made = status.found.progress
    why = status.state.why
    ended = status.ended
    train = made.newest(Train)
    yield str(found.path)
    yield f"  {status.state.word.value}" + (f": {why}" if why else "")
    if status.job.id:
        yield f"  {_job(status)}"
    yield f"  {_how_far(status, train)}"
    measured = {"loss": train.loss, **train.more, "lr": train.learning_rate} if train else {}
    if values := [f"{name} {number(value)}" for name, value in measured.items() if is_number(value)]:
        yield f"  {_join(values)}"
    facts = [
        ("last attempt: ", ended if ended and ended not in why else ""),
        ("goodput: ", found.account.text),
        *(("", event.text) for event in list(made.sums.recoveries)[-RECOVERIES:]),
        ("NOT SAVED: ", made.failing_saves),
        ("NOT STORED: ", made.store_away),
        ("slow: ", status.straggler),
        ("asked to stop by ", found.stop_requested_by),
        ("events: ", found.left_out),
    ]
    yield from (f"  {head}{fact}" for head, fact in facts if fact)


def _job(status: RunStatus) -> str:
    job, elapsed = status.job, _pair(status.job.elapsed, "elapsed")
    if status.ended:  # the run has recorded its end, so the state of its job is of no interest
        return _join([f"job {job.id}", job.nodes, elapsed])
    unknown = job.reason if job.state == UNKNOWN and job.reason not in status.state.why else ""
    return _join([f"job {job.id} {job.state}", unknown, job.nodes, elapsed, _pair(job.left, "left")])


def _how_far(status: RunStatus, train: Train | None) -> str:
    found, made = status.found, status.found.progress
    parts = [f"attempt {found.newest.number}", found.newest.plan] if found.newest else ["no attempt yet"]
    if made.step is not None or not status.ended:
        parts.append(_step(made))
    if train and train.samples_per_s:
        parts.append(train.rate())
    elif made.steps_per_s:
        parts.append(f"{number(made.steps_per_s)} steps/s")
    moves = not status.ended and status.state.word is not Word.UNKNOWN
    if moves and made.left_s is not None:
        parts.append(f"about {duration(made.left_s)} to go")
    if found.checkpoint_step is not None:
        loses = f" (a failure loses {found.unsaved_steps} steps)" if moves and found.unsaved_steps else ""
        parts.append(f"checkpoint at {found.checkpoint_step}{loses}")
    return _join(parts)


def table(statuses: Sequence[RunStatus]) -> list[str]:
    """Returns one line for each run."""
    rows = [(each.state.word.value, each.job.id or "-", _step(each.found.progress)) for each in statuses]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row, each in zip(rows, statuses, strict=True):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join([*cells, foreign_text.line(str(each.found.path))]))
    return lines


def _step(made: Progress) -> str:
    if made.step is None:
        return "no step yet"
    return f"step {made.step}" + (f" of {made.total_steps}" if made.total_steps else "")


def indent(text: str) -> str:
    """Makes a text one safe line, keeping its indentation."""
    return text[: len(text) - len(text.lstrip(" "))] + foreign_text.line(text.strip(" "))


def _join(parts: Sequence[str]) -> str:
    return " · ".join(part for part in parts if part and part != "N/A")


def _pair(value: str, name: str) -> str:
    return f"{value} {name}" if value and value not in ("INVALID", "N/A", "NOT_SET") else ""
