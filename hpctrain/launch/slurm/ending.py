"""``hpctrain stop | cancel``."""

from __future__ import annotations

import argparse
import getpass
import socket

from hpctrain.errors import ExitCode, UserError
from hpctrain.launch import live_lock
from hpctrain.launch.slurm import client, submission
from hpctrain.launch.slurm.commands import show
from hpctrain.run_dir import RunDir

WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD")
"""States of jobs that have nothing to save."""


def stop(args: argparse.Namespace) -> int:
    """Asks a running job to save and stop, or a run without one; a waiting job is taken out of the queue."""
    said, text = [], []
    for run in submission.runs(args.target):
        if runs_without_job(run):
            request_stop(run)
            text.append(f"{run.path}: asked the run to save a checkpoint and stop")
            said.append({"run": str(run.path), "asked": [], "cancelled": []})
            continue
        client.find("scancel")
        entries = submission.alive(run)
        waiting = [entry.id for entry in entries if entry.state in WAITING]
        running = [entry.id for entry in entries if entry.state not in WAITING]
        if waiting:
            client.cancel(waiting)
            text.append(f"{run.path}: took job {', '.join(waiting)} out of the queue")
        if running:
            request_stop(run)
            text.append(f"{run.path}: asked job {', '.join(running)} to save a checkpoint and stop")
        said.append({"run": str(run.path), "asked": running, "cancelled": waiting})
    show(args, said, text or ["no job runs or waits"])
    return ExitCode.DONE


def request_stop(run: RunDir) -> None:
    """Makes the STOP file.

    Raises:
        UserError: the run folder cannot be written.
    """
    try:
        run.request_stop(f"{getpass.getuser()}@{socket.gethostname()}")
    except OSError as error:
        raise UserError(
            f"{run.stop_file} cannot be made: {error.strerror}", "ask the run's owner, or hpctrain cancel ends its job"
        ) from error


def runs_without_job(run: RunDir) -> bool:
    """Whether ``hpctrain run`` or ``train`` works on the folder."""
    holder = live_lock.read(run.lock_file)
    if holder is None or holder.job is not None:
        return False
    return live_lock.is_live(holder, live_lock.silence_s(run.lock_file), live_lock.myself())


def cancel(args: argparse.Namespace) -> int:
    """Ends the run's jobs now; what was saved stays."""
    client.find("scancel")
    ids = [entry.id for run in submission.runs(args.target) for entry in submission.alive(run)]
    if ids:
        client.cancel(ids)
    show(args, {"cancelled": ids}, [f"cancelled job {', '.join(ids)}" if ids else "no job runs or waits"])
    return ExitCode.DONE
