"""What follows an attempt in a Slurm job: the same job again, a new one elsewhere, or nothing more."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from hpctrain.config import Config
from hpctrain.errors import NoRequeue, UserError
from hpctrain.launch.slurm import client
from hpctrain.launch.slurm.job import Job
from hpctrain.launch.slurm.submission import Submitted, record, submissions
from hpctrain.launch.verdict import Action
from hpctrain.monitor.exclude import excluded
from hpctrain.run_dir import RunDir

FINAL = {Action.DONE, Action.STOP, Action.FAIL, Action.DO_NOT_REQUEUE}
"""Ends after which somebody has to act: requeues count anew."""


class Ended(UserError):
    """Slurm is ending the job already."""


def requeue(config: Config, run: RunDir, job: Job) -> bool:
    """Has Slurm run the job again; whether Slurm will end this process for it.

    Slurm cannot exclude hosts from a job that runs, so where the monitor has found one to leave out, the script is
    submitted anew.

    Raises:
        Ended: somebody has cancelled the job, or Slurm itself requeues it.
        UserError: the site does not requeue.
        NoRequeue: the cap is reached.
        RunFailed: Slurm refused.
    """
    slurm = config.launch.slurm
    if is_ending(client.job_fields(job.id)):
        raise Ended("Slurm is ending the job already", "hpctrain resume goes on from the last checkpoint")
    if slurm.requeue is False:
        raise UserError("launch.slurm.requeue is false", "submit the run again, or use hpctrain submit --chain")
    if count(run.attempts()) > slurm.max_requeues:
        raise NoRequeue(f"launch.slurm.max_requeues {slurm.max_requeues} is used up", "hpctrain resume starts it anew")
    avoided = [entry.host for entry in excluded(run.monitor, time.time())]
    script = run.path / "job.sbatch"
    if avoided and config.monitor.action == "exclude_on_requeue" and script.exists():
        hosts = ",".join([*slurm.exclude, *avoided])
        number = client.submit(script, [f"--exclude={hosts}", f"--chdir={os.getcwd()}"])
        record(run, Submitted(number, time.time(), os.getcwd()))
        return False
    client.requeue(job.id)
    return True


def is_ending(fields: Mapping[str, str]) -> bool:
    """Whether somebody has cancelled the job, or Slurm itself requeues it; after a time limit it is for us to go on.

    A cancelled job whose processes still end is COMPLETING, as is every other that ends; its reason is then None.
    """
    state = fields.get("JobState")
    ours = fields.get("Reason") in ("TimeLimit", "NodeFail", "NodeDown")
    return state in ("CANCELLED", "PREEMPTED") or (state == "COMPLETING" and not ours)


def count(attempts: Sequence[Mapping[str, Any]]) -> int:
    """Attempts since the run was submitted by hand: those after the last final verdict."""
    actions = [dict(attempt.get("verdict") or {}).get("action") for attempt in attempts]
    return next((number for number, action in enumerate(reversed(actions)) if action in FINAL), len(actions))


def end_chain(run: RunDir, job: Job) -> None:
    """Takes the jobs that were to follow out of the queue: there is nothing left to do, or it would fail again."""
    jobs = [each.job for each in submissions(run)]
    later = jobs[jobs.index(job.id) + 1 :] if job.id in jobs else []
    if later:
        client.cancel(later, pending_only=True)
