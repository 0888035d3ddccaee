"""Environment variables by which a supervisor passes information to its ranks."""

from __future__ import annotations

import os

ATTEMPT = "HPCTRAIN_ATTEMPT"
"""Number of the attempt that a rank belongs to."""
RUN_DIR = "HPCTRAIN_RUN_DIR"
"""A rank's run folder; set only under a supervisor."""
STAGED = "HPCTRAIN_STAGED"
"""JSON object: node-local copy by source, with sources as the run file writes them."""
CONVENTION = "HPCTRAIN_CONVENTION"
"""Convention for a plain program's variables, followed by the names of variables that the run file sets."""
PLACE = "HPCTRAIN_PLACE"
"""A plain program's place among the ranks, as JSON."""
WATCHED_DIR = "HPCTRAIN_WATCHED_DIR"
"""Run folder of a plain program; not RUN_DIR, since the program may use hpctrain with a run folder of another run."""
STOP_SIGNAL = "HPCTRAIN_STOP_SIGNAL"
"""Name of the signal that asks a plain program to stop."""
JOB = "HPCTRAIN_JOB"
"""The supervisor's job if its scheduler is not Slurm; if set, signals come from the scheduler, not from a person."""
START = "HPCTRAIN_JOB_START"
"""Which start of that job this is: any increasing number, such as the time."""


def current_job() -> tuple[str | None, int]:
    """Returns this process's job (of Slurm or another scheduler; None without one) and which start of it this is."""
    if job := os.environ.get("SLURM_JOB_ID"):
        return job, int(os.environ.get("SLURM_RESTART_COUNT") or 0)
    return os.environ.get(JOB), int(os.environ.get(START) or 0)


def current_attempt() -> int:
    """Returns the attempt that this process belongs to; 1 if none is set."""
    return int(os.environ.get(ATTEMPT) or 1)
