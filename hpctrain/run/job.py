"""Jobs of a run as a scheduler reports them."""

from __future__ import annotations

from dataclasses import dataclass

ALIVE = (
    *("PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED"),
    *("STOPPED", "REQUEUED", "REQUEUE_HOLD", "RESIZING", "STAGE_OUT"),
)
"""States of jobs that may still act on the run folder."""


@dataclass(frozen=True)
class QueueEntry:
    """One job, or one element of an array, as Slurm knows it."""

    id: str
    """123, or 120_4 for element 4 of array 120."""
    state: str
    """PENDING, RUNNING, COMPLETED, FAILED, CANCELLED, TIMEOUT, NODE_FAIL, PREEMPTED, OUT_OF_MEMORY ..."""
    reason: str
    """Why it waits, or ended."""
    elapsed: str
    left: str
    limit: str
    nodes: str
    start: str
