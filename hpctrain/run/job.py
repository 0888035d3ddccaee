"""Jobs of a run as a scheduler reports them."""

from __future__ import annotations

from dataclasses import dataclass

ALIVE = (
    *("PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED"),
    *("STOPPED", "REQUEUED", "REQUEUE_HOLD", "RESIZING", "STAGE_OUT"),
)
"""States of jobs that may still act on the run folder."""
UNKNOWN = "UNKNOWN"
"""State of jobs of which a scheduler has not told, or which it has forgotten: they may have ended in any way."""
REFUSED = "REFUSED"
"""State of what a scheduler did not take as a job."""

ADVICE = {
    "DependencyNeverSatisfied": "a job that it waits for did not end well: cancel it, and submit it without --after",
    "Dependency": "it begins when the jobs that it waits for have ended well",
    "JobHeldUser": "it is held: scontrol release lets it begin",
    "JobHeldAdmin": "an administrator holds it: ask the site",
    "BeginTime": "it begins at launch.slurm.begin, or some time after a requeue",
    "PartitionNodeLimit": "the partition never gives as many nodes: lower launch.nodes, or take another partition",
    "PartitionTimeLimit": "the partition never gives that much time: lower launch.slurm.time",
    "ReqNodeNotAvail": "nodes that it needs are down or reserved: sinfo -R tells why",
}
"""What to do about the reasons for which jobs wait longest."""


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
