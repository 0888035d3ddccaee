"""Continues a run after its attempts in a Slurm job: requeues the job, submits a new one, or ends the chain."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from functools import partial

from hpctrain.config.sections import Config
from hpctrain.errors import HpctrainError, NoRequeue, RunFailed, UserError
from hpctrain.launch.engines.jobs import SCRIPT, Submitted, note, submissions, write
from hpctrain.launch.engines.slurm import client, leave_out
from hpctrain.launch.engines.slurm.job import Job, Who, who_ends
from hpctrain.launch.engines.slurm.submission import apart, is_element, plan, send
from hpctrain.launch.outage_retry import retry_outage
from hpctrain.run.attempts import Attempt, Attempts
from hpctrain.run.folder import RunDir
from hpctrain.system.output import say
from hpctrain.system.retry import retry_files, retry_or_fail

BY_HAND = "hpctrain resume continues from the last checkpoint; hpctrain submit --chain N submits N jobs beforehand"


class Cancelled(UserError):
    """The job was cancelled."""


def requeue(config: Config, run: RunDir, job: Job) -> bool:
    """Has Slurm run the job again; returns whether it was requeued, so that Slurm will end this process.

    Slurm cannot exclude hosts from a job that is requeued, so if one must be left out, the script is submitted as a new
    job; likewise if Slurm does not requeue the job (``JobRequeue=0``).

    Raises:
        Cancelled: the job was cancelled.
        Stopped: a person stopped the run while the controller was down.
        UserError: launch.slurm.requeue is false.
        NoRequeue: launch.slurm.max_requeues is reached.
        RunFailed: Slurm refused.
    """
    slurm = config.launch.slurm
    if who_ends(client.job_fields(job.id), job.restarts) is Who.PERSON:
        raise Cancelled("the job has been cancelled", "hpctrain resume continues from the last checkpoint")
    if slurm.requeue is False:
        raise UserError("launch.slurm.requeue is false", "submit the run again, or use hpctrain submit --chain")
    attempts, jobs = retry_or_fail(lambda: (Attempts(run).all(), submissions(run, "slurm")))
    if requeues(attempts, jobs, job.id) >= slurm.max_requeues:
        raise NoRequeue(f"launch.slurm.max_requeues {slurm.max_requeues} is used up", "hpctrain resume starts it again")
    option = leave_out.option(config, run)
    if option and has_script(config, run, job):
        try:
            succeed(run, job, option)
            return False
        except RunFailed as error:  # too few nodes, or Slurm does not know the name: better a bad node than no run
            say(f"the job continues without excluding a node ({option[0]}): {error.what}")
    try:
        retry_outage(lambda: put_back(job), client.Unanswered, run)
    except client.Disabled as error:
        if not has_script(config, run, job):
            raise RunFailed(f"the site does not requeue: {error.what}", BY_HAND) from error
        say(f"the site does not requeue ({error.what}): a new job continues the run")
        succeed(run, job)
        return False
    return True


def has_script(config: Config, run: RunDir, job: Job) -> bool:
    """Whether the run has a script to submit again. Writes one for an array element, which shares the array's script.

    Raises:
        RunFailed: it cannot be written.
    """
    exists = partial(retry_files, (run.path / SCRIPT).exists)
    if is_element(run, job.id) and not exists():
        write(plan(config, run))
    return exists()


def succeed(run: RunDir, job: Job, options: Sequence[str] = ()) -> None:
    """Submits the run's script as a new job that replaces this one. Raises RunFailed if Slurm refuses, or Stopped."""
    words = [*options, f"--chdir={os.getcwd()}"]
    number = retry_outage(lambda: send(run, words), client.Unheard, run)
    note(run, Submitted(number, time.time(), os.getcwd(), replaces=job.id))


def put_back(job: Job) -> None:
    """Has Slurm requeue the job, unless an earlier unanswered request already did."""
    if who_ends(client.job_fields(job.id), job.restarts) is not Who.REQUEUE:
        client.requeue(job.id)


def line_of(jobs: Sequence[Submitted], job: str) -> list[str]:
    """Returns a job and those that it replaces, newest first."""
    replaced = {each.job: each.replaces for each in jobs}
    line = [job]
    while (before := replaced.get(line[-1])) is not None and before not in line:  # a damaged file may hold a cycle
        line.append(before)
    return line


def requeues(attempts: Sequence[Attempt], jobs: Sequence[Submitted], job: str) -> int:
    """Counts the restarts of a job and of the jobs that it replaces, by hpctrain, Slurm or a person."""
    line = line_of(jobs, job)
    # One start of a job may make several attempts in place; if its number is not recorded, each attempt counts.
    starts = {
        (attempt.job, attempt.number if attempt.restarts is None else -1 - attempt.restarts)
        for attempt in attempts
        if attempt.job in line
    }
    return max(0, len(starts) - 1)


def end_chain(run: RunDir, job: Job) -> None:
    """Cancels the later jobs of a chain: there is nothing left to do, or they would fail too."""
    try:
        jobs = [each.job for each in submissions(run, "slurm")]
        later = jobs[jobs.index(job.id) + 1 :] if job.id in jobs else []
        later, others = apart(run, later) if later else ([], [])
    except (HpctrainError, OSError) as error:
        say(str(error))
        return
    for sentence in others:
        say(sentence)
    if later:
        take_out(later, pending_only=True)


def take_out(jobs: Sequence[str], pending_only: bool = False) -> None:
    """Cancels jobs that have nothing left to do; if that fails, only reports it."""
    try:
        client.cancel(jobs, pending_only=pending_only)
    except HpctrainError as error:
        say(str(error))
