"""``hpctrain status | logs``."""

from __future__ import annotations

import argparse
from pathlib import Path

from hpctrain.commands.slurm import show
from hpctrain.errors import ExitCode, UserError
from hpctrain.launch.engines.slurm import status as run_status
from hpctrain.launch.engines.slurm import submission
from hpctrain.run import live_lock, which
from hpctrain.run import logs as run_logs
from hpctrain.run.folder import RunDir
from hpctrain.system import foreign_text

FOLLOW_S = 0.5
"""Seconds between two readings of a log that is followed."""


def status(args: argparse.Namespace) -> int:
    """Prints where the run, each element of an array, or each of the user's runs stands; without Slurm, too."""
    runs = which.runs(args.target) if args.target else run_status.own_runs(Path.cwd())
    found = run_status.of_runs(runs)
    text = run_status.lines(found) if args.target else run_status.table(found)
    show(args, [each.plain() for each in found], text or ["no runs here (runs/), and none in Slurm's queue"])
    return ExitCode.DONE


def logs(args: argparse.Namespace) -> int:
    """Prints logs of ranks."""
    run = which.folder(args.target)
    found = run_logs.find(run, args.rank, args.attempt)
    if args.first_error:
        error = run_logs.first_error(run, found)
        said = {"file": str(error[0].path), "rank": error[0].rank, "text": error[1]} if error else {}
        show(args, said, [f"==> {error[0].path} <==", error[1]] if error else ["no error in these logs"])
        return ExitCode.DONE
    if not found:
        raise UserError(f"{run.logs} holds no such log", "hpctrain status shows whether the job has started")
    if args.follow:
        # Rank 0 prints into the job's log.
        wanted = found[0] if args.rank else next((log for log in found if log.rank == "job"), found[0])
        for text in run_logs.follow(wanted.path, lambda: is_over(run), FOLLOW_S):
            foreign_text.show(text, end="")
        return ExitCode.DONE
    places = run_logs.places(run, found)
    data = [
        {"file": str(log.path), "rank": log.rank, "attempt": log.attempt, "place": place.strip(" ()") or None}
        for log, place in zip(found, places, strict=True)
    ]
    pairs = zip(found, places, strict=True)
    show(args, data, [f"==> {log.path}{place} <==\n{run_logs.read(log.path)}" for log, place in pairs])
    return ExitCode.DONE


def is_over(run: RunDir) -> bool:
    """Whether nobody works on the run, and no job of it waits."""
    return live_lock.at_work(run) is None and not submission.goes_on(run)
