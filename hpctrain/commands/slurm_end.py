"""``hpctrain stop | cancel``."""

from __future__ import annotations

import argparse
import getpass
import socket

from hpctrain.commands.slurm import show
from hpctrain.errors import ExitCode, RunFailed, UserError
from hpctrain.launch.engines.slurm import client, submission
from hpctrain.run import live_lock, stop_request, which
from hpctrain.run.folder import RunDir
from hpctrain.run.stop_request import StopRequest

WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD")
"""States of jobs that have nothing to save."""


def stop(args: argparse.Namespace) -> int:
    """Asks a running job to save and stop, or a run without one; others have nothing to save and are cancelled.

    An attempt that begins forgets older requests: a job that runs without holding the run folder would not see ours.
    """
    said, text = [], []
    for run in which.runs(args.target):
        holder = live_lock.at_work(run)
        entries = [] if holder is not None and holder.job is None else submission.alive(run)
        waiting = [entry.id for entry in entries if entry.state in WAITING or holder is None]
        running = [entry.id for entry in entries if entry.id not in waiting]
        if waiting:
            waiting, others = submission.apart(run, waiting)
            text += others
        if waiting:
            client.cancel(waiting)
            text.append(f"{run.path}: cancelled job {', '.join(waiting)}, which has nothing to save")
        if holder is not None:  # perhaps in an allocation that is not one of the run's own jobs
            request_stop(run)
            who = f"job {', '.join(running)}" if running else "the run"
            text.append(f"{run.path}: asked {who} to save a checkpoint and stop")
        said.append({"run": str(run.path), "asked": running, "cancelled": waiting})
    show(args, said, text or ["no job runs or waits"])
    return ExitCode.DONE


def request_stop(run: RunDir) -> None:
    """Makes the STOP file.

    Raises:
        UserError: the run folder cannot be written.
    """
    try:
        stop_request.request_stop(run, StopRequest(f"{getpass.getuser()}@{socket.gethostname()}"))
    except RunFailed as error:
        fix = "ask the run's owner, or hpctrain cancel ends its job"
        raise UserError(f"{run.stop_file} cannot be made: {error.what}", fix) from error


def cancel(args: argparse.Namespace) -> int:
    """Ends the run's jobs now; what was saved stays."""
    client.find("scancel")
    ids, left = [], []
    for run in which.runs(args.target):
        own, others = submission.apart(run, [entry.id for entry in submission.alive(run)])
        ids += own
        left += others
    if ids:
        client.cancel(ids)
    said = {"cancelled": ids, "left_alone": left}
    show(args, said, [f"cancelled job {', '.join(ids)}"] * bool(ids) + left or ["no job runs or waits"])
    return ExitCode.DONE
