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
"""Run folder of a plain program: it may be one of ours with another one of its own."""
STOP_SIGNAL = "HPCTRAIN_STOP_SIGNAL"
"""Name of the signal that asks a plain program to stop."""


def current_attempt() -> int:
    """The attempt this process belongs to; 1 if nobody counts."""
    return int(os.environ.get(ATTEMPT) or 1)
