"""What a supervisor passes to its ranks in environment variables."""

from __future__ import annotations

import os

ATTEMPT = "HPCTRAIN_ATTEMPT"
"""Which attempt a rank belongs to."""
RUN_DIR = "HPCTRAIN_RUN_DIR"
"""A rank's run folder; set if a supervisor watches."""
STAGED = "HPCTRAIN_STAGED"
"""JSON of copies on node-local scratch by source, as the run file writes it."""
CONVENTION = "HPCTRAIN_CONVENTION"
"""Which variables a plain program gets, and the names of those that the run file gives it."""
PLACE = "HPCTRAIN_PLACE"
"""A plain program's place among the ranks, as JSON."""
WATCHED_DIR = "HPCTRAIN_WATCHED_DIR"
"""Run folder of a plain program: it may be an hpctrain program with a separate run folder."""
STOP_SIGNAL = "HPCTRAIN_STOP_SIGNAL"
"""Name of the signal that asks a plain program to stop."""
JOB = "HPCTRAIN_JOB"
"""The job of another scheduler than Slurm that a supervisor runs in: signals are its, not a person's."""
START = "HPCTRAIN_JOB_START"
"""Which start of that job this is: any number that grows, such as the time."""


def current_job() -> tuple[str | None, int]:
    """The job that this process belongs to, of Slurm or another scheduler, and how often it was started again."""
    if job := os.environ.get("SLURM_JOB_ID"):
        return job, int(os.environ.get("SLURM_RESTART_COUNT") or 0)
    return os.environ.get(JOB), int(os.environ.get(START) or 0)


def current_attempt() -> int:
    """The attempt this process belongs to; 1 without a supervisor."""
    return int(os.environ.get(ATTEMPT) or 1)
