"""``hpctrain stop | cancel``."""

from __future__ import annotations

import argparse
import getpass
import socket

from hpctrain.errors import ExitCode
from hpctrain.launch.slurm import client, submission
from hpctrain.launch.slurm.commands import show

WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD")
"""States of jobs that have nothing to save."""


def stop(args: argparse.Namespace) -> int:
    """Asks a running job to save and stop; a waiting one is taken out of the queue."""
    client.find("scancel")
    said, text = [], []
    for run in submission.runs(args.target):
        entries = submission.alive(run)
        waiting = [entry.id for entry in entries if entry.state in WAITING]
        running = [entry.id for entry in entries if entry.state not in WAITING]
        if waiting:
            client.cancel(waiting)
            text.append(f"{run.path}: took job {', '.join(waiting)} out of the queue")
        if running:
            run.request_stop(f"{getpass.getuser()}@{socket.gethostname()}")
            text.append(f"{run.path}: asked job {', '.join(running)} to save a checkpoint and stop")
        said.append({"run": str(run.path), "asked": running, "cancelled": waiting})
    show(args, said, text or ["no job runs or waits"])
    return ExitCode.DONE


def cancel(args: argparse.Namespace) -> int:
    """Ends the run's jobs now; what was saved stays."""
    client.find("scancel")
    ids = [entry.id for run in submission.runs(args.target) for entry in submission.alive(run)]
    if ids:
        client.cancel(ids)
    show(args, {"cancelled": ids}, [f"cancelled job {', '.join(ids)}" if ids else "no job runs or waits"])
    return ExitCode.DONE
