"""Who ends a job, read from what Slurm says of it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

GOING_ON = ("RUNNING", "CONFIGURING", "SUSPENDED", "STOPPED", "RESIZING")
NOBODYS_WISH = ("TimeLimit", "NodeFail", "NodeDown")
"""Reasons for which Slurm ends a job that no one cancelled."""


class Who(StrEnum):
    """Who ends a job."""

    NOBODY = "nobody"
    """It continues, as far as Slurm knows."""
    PERSON = "person"
    """Cancelled, or ended in a way that looks the same: no one else may start it again."""
    LIMIT = "limit"
    """Its time is over, or a node lost: resuming is for us."""
    PREEMPTION = "preemption"
    """Its nodes are wanted, after a grace time: resuming is for us."""
    REQUEUE = "requeue"
    """Slurm has put it back into the queue already: scontrol requeue, preemption without a grace time."""


def who_ends(fields: Mapping[str, str], restarts: int) -> Who:
    """Who ends the job that this process runs in.

    Args:
        fields: of ``scontrol show job``; empty if Slurm does not say.
        restarts: times that the job had been requeued when this process started.
    """
    state = fields.get("JobState", "RUNNING")
    if int(fields.get("Restarts") or 0) > restarts:
        return Who.REQUEUE
    if state in GOING_ON:
        # The job runs on until the grace time is over; only the ranks are informed, by SIGTERM.
        preempted = fields.get("PreemptTime", "None")
        since_start = preempted >= fields.get("StartTime", "")
        return Who.PREEMPTION if preempted != "None" and since_start else Who.NOBODY
    # A job whose processes still end is COMPLETING, whatever ends it; of a cancelled one the reason is None.
    if state in ("COMPLETING", "TIMEOUT", "NODE_FAIL") and fields.get("Reason") in NOBODYS_WISH:
        return Who.LIMIT
    return Who.PERSON
