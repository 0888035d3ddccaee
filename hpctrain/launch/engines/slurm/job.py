"""The Slurm job that this process runs in, from its environment, and who ends it, from what Slurm says of it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

GOING_ON = ("RUNNING", "CONFIGURING", "SUSPENDED", "STOPPED", "RESIZING")
NOBODYS_WISH = ("TimeLimit", "NodeFail", "NodeDown")
"""Reasons for which Slurm ends a job that no one cancelled."""


@dataclass(frozen=True)
class Job:
    """An allocation."""

    id: str
    """What scontrol takes: 123, or 120_4 for an element of an array."""
    nodes: int
    ranks: int
    restarts: int
    """Times that Slurm requeued the job."""
    nodelist: str
    """Slurm's compact notation: n[1-2]."""
    part: tuple[str, ...] = ()
    """Names of the nodes, if the allocation has more: spare, lost or broken ones."""

    def on(self, hosts: Sequence[str]) -> Job:
        """The same on some of its nodes."""
        ranks = self.ranks // self.nodes * len(hosts)
        return replace(self, nodes=len(hosts), ranks=ranks, nodelist=",".join(hosts), part=tuple(hosts))


def current(environ: Mapping[str, str] = os.environ) -> Job | None:
    """The job of a batch script, or None outside one."""
    number = environ.get("SLURM_JOB_ID")
    if not number or "SLURM_JOB_NODELIST" not in environ:
        return None
    array, element = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    nodes = int(environ.get("SLURM_JOB_NUM_NODES", "1"))
    return Job(
        id=f"{array}_{element}" if array and element else number,
        nodes=nodes,
        ranks=tasks(environ, nodes),
        restarts=int(environ.get("SLURM_RESTART_COUNT", "0")),
        nodelist=environ["SLURM_JOB_NODELIST"],
    )


def tasks(environ: Mapping[str, str], nodes: int) -> int:
    """Ranks of the allocation: SLURM_NTASKS, else SLURM_TASKS_PER_NODE (``2(x3),1``), else one a node."""
    if total := environ.get("SLURM_NTASKS"):
        return int(total)
    parts = re.findall(r"(\d+)(?:\(x(\d+)\))?", environ.get("SLURM_TASKS_PER_NODE", ""))
    return sum(int(count) * int(times or 1) for count, times in parts) or nodes


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
