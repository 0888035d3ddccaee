"""What a supervisor passes to its ranks in environment variables."""

from __future__ import annotations

import os

ATTEMPT = "HPCTRAIN_ATTEMPT"
"""Which attempt a rank belongs to."""
RUN_DIR = "HPCTRAIN_RUN_DIR"
"""A rank's run folder; set if a supervisor watches."""
STAGED = "HPCTRAIN_STAGED"
"""JSON of copies on node-local scratch by source, as the run file writes it."""
STOP_SIGNAL = "HPCTRAIN_STOP_SIGNAL"
"""Name of the signal that asks a plain program to stop."""


def current_attempt() -> int:
    """The attempt this process belongs to; 1 if nobody counts."""
    return int(os.environ.get(ATTEMPT) or 1)
