"""What commands need of a scheduler: Slurm, batch systems and Kubernetes fulfil it."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from hpctrain.config.sections import Config
from hpctrain.errors import RunFailed, UserError
from hpctrain.launch.engines.jobs import Plan, Wish, submissions
from hpctrain.run.folder import RunDir
from hpctrain.run.live_lock import TO_SUBMIT, LiveLock, myself
from hpctrain.run.run_status import ALIVE, QueueEntry

TIMEOUT_S = 60.0
"""Longest wait for an answer that is needed."""


CHARACTERS = 500
"""Of what a command says when it refuses."""


class Scheduler(Protocol):
    """Where jobs of runs wait and run."""

    name: str
    """The value of ``launch.engine``."""
    title: str
    ends_gently: bool
    """Whether ranks of a job that is ended are first asked to save a checkpoint."""

    def plan(self, config: Config, run: RunDir, wish: Wish) -> Plan:
        """The script or object of a run; nothing has been written.

        Raises:
            UserError: a wish, or a value, that it cannot take.
        """

    def command(self, planned: Plan, wish: Wish) -> Sequence[str]:
        """What submits it, to be shown."""

    def submit(self, planned: Plan, wish: Wish) -> tuple[list[str], Sequence[str]]:
        """Writes the run folder; the jobs, which it records, and what else to print.

        Raises:
            UserError: the scheduler's commands are missing, or a job of the run waits or runs.
            RunFailed: it refused.
        """

    def states(self, jobs: Sequence[Sequence[str]], timeout_s: float, ended: bool) -> Mapping[str, QueueEntry]:
        """How jobs stand and who ended them, by job: of several runs, oldest first. It may have forgotten some.

        Args:
            jobs: of each run.
            timeout_s: longest wait.
            ended: of those, too, that its queue does not show any more.

        Raises:
            RunFailed: it does not answer.
        """

    def end(self, jobs: Sequence[tuple[RunDir, Sequence[str]]]) -> tuple[list[str], list[str]]:
        """Ends jobs of runs; which, and a sentence about each that is not the run's own.

        Raises:
            RunFailed: it did not end all; the message names those that it did end.
        """

    def log(self, run: RunDir, job: str) -> str:
        """The job's own log if it is elsewhere than in the run folder, else an empty text."""


def alive(scheduler: Scheduler, run: RunDir) -> list[QueueEntry]:
    """Jobs of the run that wait or run."""
    jobs = [each.job for each in submissions(run, scheduler.name)]
    found = scheduler.states([jobs], TIMEOUT_S, ended=False) if jobs else {}
    return [entry for entry in found.values() if entry.state in ALIVE]


@contextlib.contextmanager
def to_submit(scheduler: Scheduler, run: RunDir, own_job: str | None = None) -> Iterator[None]:
    """Until the job is noted, where the next one looks for it. Two jobs must not write one run folder.

    Raises:
        UserError: a job of the run waits or runs, which is not ``own_job``.
    """
    run.create()
    with LiveLock(run, myself(), TO_SUBMIT).held():
        for entry in alive(scheduler, run):
            if entry.id != own_job:
                raise UserError(
                    f"job {entry.id} of {run.path} is {entry.state} already",
                    "wait for it, end it with hpctrain cancel, or give the new run another name",
                )
        yield


def end_each(
    jobs: Sequence[tuple[RunDir, Sequence[str]]], is_of: Callable[[RunDir, str], bool], end: Callable[[str], object]
) -> tuple[list[str], list[str]]:
    """``Scheduler.end`` job by job: one that cannot be ended does not keep the others.

    Raises:
        RunFailed: what failed, and which jobs have been ended all the same.
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
        told = [f"ended all the same: job {', '.join(ended)}"] * bool(ended)
        raise RunFailed(
            "; ".join([*failed, *told, *left]), "see whether the scheduler ends these jobs without hpctrain"
        )
    return ended, left


def ask(words: Sequence[str], given: str = "", timeout_s: float = TIMEOUT_S) -> str:
    """What a scheduler's command prints.

    Raises:
        UserError: there is no such command.
        RunFailed: in its own words, without what it was given.
    """
    if shutil.which(words[0]) is None:
        raise UserError(f"{words[0]} is not on PATH", "run this where jobs are submitted; hpctrain render needs none")
    try:
        done = subprocess.run(words, input=given, capture_output=True, text=True, errors="replace", timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise RunFailed(f"{words[0]} did not answer within {timeout_s:.0f} s", "try again when it answers") from error
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())[:CHARACTERS] or f"exit code {done.returncode}"
        raise RunFailed(f"{' '.join(words[:2])} refused: {said}", "see whether this command works without hpctrain")
    return done.stdout
