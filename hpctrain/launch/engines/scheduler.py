"""The interface between commands and schedulers, implemented for Slurm and batch systems."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from hpctrain.config.sections import Config
from hpctrain.errors import RunFailed, UserError
from hpctrain.launch.engines.jobs import Plan, SubmitOptions, Submitted, note, note_refusal, submissions, write
from hpctrain.run.folder import RunDir
from hpctrain.run.live_lock import TO_SUBMIT, LiveLock, myself
from hpctrain.run.run_status import ALIVE, QueueEntry

TIMEOUT_S = 60.0
"""Timeout in seconds for answers that are needed."""


CHARACTERS = 500
"""Maximum length of a quoted refusal."""


class Scheduler(Protocol):
    """A scheduler, in which jobs of runs wait and run."""

    name: str
    """The value of ``launch.engine``."""
    title: str
    ends_gently: bool
    """Whether ending a job first asks its ranks to save a checkpoint."""

    def plan(self, config: Config, run: RunDir, options: SubmitOptions) -> Plan:
        """Returns the script of a run; writes nothing.

        Raises:
            UserError: an option or value that the scheduler does not support.
        """

    def command(self, planned: Plan) -> Sequence[str]:
        """Returns the command that submits the plan, for display."""

    def submit(self, planned: Plan) -> tuple[list[str], Sequence[str]]:
        """Writes the run folder, submits and records the jobs; returns them, and lines to print.

        Raises:
            UserError: the scheduler's commands are missing, or the run already has a waiting or running job.
            RunFailed: the scheduler refused.
        """

    def states(self, jobs: Sequence[Sequence[str]], timeout_s: float, ended: bool) -> Mapping[str, QueueEntry]:
        """Returns the states of jobs, by job, without those that the scheduler has forgotten.

        Args:
            jobs: for each run its jobs, oldest first.
            timeout_s: timeout in seconds.
            ended: include jobs that the queue no longer shows, if the scheduler can look them up.

        Raises:
            RunFailed: the scheduler does not answer.
        """

    def unrecorded(self, runs: Sequence[RunDir], timeout_s: float = TIMEOUT_S) -> Sequence[Sequence[str]]:
        """Returns for each run its live jobs that are not recorded in its folder, if the scheduler can find them.

        Raises:
            RunFailed: the scheduler does not answer.
        """
        return [()] * len(runs)

    def end(self, jobs: Sequence[tuple[RunDir, Sequence[str]]]) -> tuple[list[str], list[str]]:
        """Ends jobs of runs; returns them, and a sentence about each job that is not the run's own.

        Raises:
            RunFailed: not all could be ended; the message names those that were.
        """


def alive(scheduler: Scheduler, runs: Sequence[RunDir], recorded_only: bool = False) -> list[list[QueueEntry]]:
    """Returns for each run its jobs that are waiting or running; asks the scheduler once about all of them."""
    jobs = [[each.job for each in submissions(run, scheduler.name)] for run in runs]
    if not recorded_only:
        jobs = [[*known, *others] for known, others in zip(jobs, scheduler.unrecorded(runs), strict=True)]
    found = scheduler.states(jobs, TIMEOUT_S, ended=False) if any(jobs) else {}
    entries = [entry for entry in found.values() if entry.state in ALIVE]
    # An array's number gives its elements.
    return [
        [entry for entry in entries if not own.isdisjoint((entry.id, entry.id.partition("_")[0]))]
        for own in map(set, jobs)
    ]


@contextlib.contextmanager
def to_submit(scheduler: Scheduler, run: RunDir, own_job: str | None = None) -> Iterator[None]:
    """Locks a run for submission, since two jobs must not write to one run folder.

    Submit and record the job in the body, so that the next submission finds it.

    Raises:
        UserError: a job of the run other than ``own_job`` is waiting or running, or is being submitted.
    """
    run.create()
    with LiveLock(run, myself(), TO_SUBMIT).held():
        for entry in alive(scheduler, [run])[0]:
            if entry.id != own_job:
                fix = "wait for it, end it with hpctrain cancel, or give the new run another name"
                raise UserError(f"job {entry.id} of {run.path} is {entry.state} already", fix)
        yield


def submit_one(
    scheduler: Scheduler, planned: Plan, send: Callable[[], str], own_job: str | None = None
) -> tuple[list[str], Sequence[str]]:
    """Implements ``Scheduler.submit`` for one job; ``send`` submits it and returns it. See ``to_submit``."""
    with to_submit(scheduler, planned.run, own_job):
        undo = write(planned)
        try:
            job = send()
        except RunFailed as error:
            note_refusal(planned.run, error, undo)
            raise
        note(planned.run, Submitted(job, time.time(), os.getcwd(), engine=scheduler.name))
    return [job], []


def end_each(
    jobs: Sequence[tuple[RunDir, Sequence[str]]], is_of: Callable[[RunDir, str], bool], end: Callable[[str], object]
) -> tuple[list[str], list[str]]:
    """Implements ``Scheduler.end`` job by job; continues after a job that cannot be ended.

    Raises:
        RunFailed: some jobs could not be ended; the message names the ones that were.
    """
    ended, left, failed = [], [], []
    for run, job in [(run, job) for run, given in jobs for job in given]:
        try:
            if is_of(run, job):
                end(job)
                ended.append(job)
            else:
                left.append(f"job {job} is left alone: it is not known to be of {run.path}")
        except RunFailed as error:
            failed.append(f"job {job}: {error.what}")
    if failed:
        succeeded = [f"cancelled anyway: job {', '.join(ended)}"] * bool(ended)
        fix = "check whether these jobs can be cancelled without hpctrain"
        raise RunFailed("; ".join([*failed, *succeeded, *left]), fix)
    return ended, left


def ask(words: Sequence[str], given: str = "", timeout_s: float = TIMEOUT_S) -> str:
    """Runs a scheduler's command with ``given`` on standard input; returns what it prints.

    Raises:
        UserError: the command is not on PATH.
        RunFailed: it failed, with its own message but without ``given``, or did not answer in time.
    """
    if shutil.which(words[0]) is None:
        raise UserError(f"{words[0]} is not on PATH", "run this where jobs are submitted; hpctrain render needs none")
    try:
        done = subprocess.run(words, input=given, capture_output=True, text=True, errors="replace", timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        fix = "see whether the queue has the job, and try again if it has not" if given else "try again when it answers"
        raise RunFailed(f"{words[0]} did not answer within {timeout_s:.0f} s", fix) from error
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())[:CHARACTERS] or f"exit code {done.returncode}"
        raise RunFailed(f"{' '.join(words[:2])} refused: {said}", "check whether this command works without hpctrain")
    return done.stdout
