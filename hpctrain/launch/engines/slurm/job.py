"""The Slurm job that this process runs in, from its environment; and who is ending it, from Slurm's description."""

from __future__ import annotations

import calendar
import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from hpctrain.errors import UserError

GOING_ON = ("RUNNING", "CONFIGURING", "SUSPENDED", "STOPPED", "RESIZING")
NOBODYS_WISH = ("TimeLimit", "NodeFail", "NodeDown")
"""Slurm's reasons for ending a job that no one cancelled."""

AT_ONCE_S = 2.0
"""Longest time between a preemption and the end of a job that gets no grace time, in seconds."""


@dataclass(frozen=True)
class Job:
    """An allocation, or the part of it that ranks run on."""

    id: str
    """Job as scontrol takes it: 123, or 120_4 for an array element."""
    nodes: int
    ranks: int
    restarts: int
    """How often Slurm has requeued the job."""
    nodelist: str
    """Nodes in Slurm's compact notation: n[1-2]."""
    part: tuple[str, ...] = ()
    """Names of the nodes, if they are a part of the allocation, without spare, lost or broken ones; else empty."""

    def on(self, hosts: Sequence[str]) -> Job:
        """Returns the job restricted to some of its nodes."""
        ranks = self.ranks // self.nodes * len(hosts)
        return replace(self, nodes=len(hosts), ranks=ranks, nodelist=",".join(hosts), part=tuple(hosts))


def current(environ: Mapping[str, str] = os.environ) -> Job | None:
    """Returns the job that this process runs in; None outside a job."""
    number = environ.get("SLURM_JOB_ID")
    if not number or "SLURM_JOB_NODELIST" not in environ:
        return None
    array = environ.get("SLURM_ARRAY_JOB_ID")
    element = environ.get("SLURM_ARRAY_TASK_ID")
    nodes = int(environ.get("SLURM_JOB_NUM_NODES", "1"))
    return Job(
        id=f"{array}_{element}" if array and element else number,
        nodes=nodes,
        ranks=tasks(environ, nodes),
        restarts=int(environ.get("SLURM_RESTART_COUNT", "0")),
        nodelist=environ["SLURM_JOB_NODELIST"],
    )


def tasks(environ: Mapping[str, str], nodes: int) -> int:
    """Returns the allocation's ranks: SLURM_NTASKS, else from SLURM_TASKS_PER_NODE (``2(x3),1``), else one per node."""
    if total := environ.get("SLURM_NTASKS"):
        return int(total)
    parts = re.findall(r"(\d+)(?:\(x(\d+)\))?", environ.get("SLURM_TASKS_PER_NODE", ""))
    return sum(int(count) * int(times or 1) for count, times in parts) or nodes


def unix_seconds(shown: str | None, otherwise: float) -> float:
    """Parses a time in UTC as Slurm shows it, to Unix seconds."""
    try:
        return float(calendar.timegm(time.strptime(shown or "", "%Y-%m-%dT%H:%M:%S")))
    except ValueError:
        return otherwise


def ranks_here(environ: Mapping[str, str] = os.environ) -> int:
    """Returns the number of ranks that a process may start by itself: its job's tasks, 1 outside a job.

    Raises:
        UserError: it would leave nodes of the job idle, or is not on one of them.
    """
    job = current(environ)
    if job is not None and (job.nodes > 1 or "SLURMD_NODENAME" not in environ):
        what = f"hpctrain run uses only this machine, and job {job.id} has {job.nodelist}"
        fix = "hpctrain supervise run.yaml uses the job's nodes; env -u SLURM_JOB_ID hpctrain run ... only this machine"
        raise UserError(what, fix)
    return job.ranks if job is not None else 1


class Who(StrEnum):
    """Who is ending a job."""

    NOBODY = "nobody"
    """It continues, as far as Slurm knows."""
    PERSON = "person"
    """It was cancelled, or ended in a way that looks the same; it must not be restarted automatically."""
    LIMIT = "limit"
    """It reached its time limit or lost a node; hpctrain must requeue it."""
    PREEMPTION = "preemption"
    """It is being preempted, with a grace time; hpctrain must requeue it."""
    REQUEUE = "requeue"
    """Slurm has already requeued it: scontrol requeue, or preemption without a grace time."""


def who_ends(fields: Mapping[str, str], restarts: int) -> Who:
    """Returns who is ending the job that this process runs in.

    Args:
        fields: fields of ``scontrol show job``; empty if Slurm does not answer.
        restarts: how often the job had been requeued when this process started.
    """
    state = fields.get("JobState", "RUNNING")
    if int(fields.get("Restarts") or 0) > restarts:
        return Who.REQUEUE
    preempted, ended = (unix_seconds(fields.get(name), math.inf) for name in ("PreemptTime", "EndTime"))
    is_preempted = unix_seconds(fields.get("StartTime"), 0.0) <= preempted < math.inf
    if state in GOING_ON:
        # A preempted job keeps running until the grace time is over; only the ranks are informed, by SIGTERM.
        return Who.PREEMPTION if is_preempted else Who.NOBODY
    # Without a grace time Slurm ends the job when it preempts it; during a grace time a person may have cancelled it.
    if is_preempted and (state == "PREEMPTED" or ended - preempted <= AT_ONCE_S):
        return Who.PREEMPTION
    # Any job is COMPLETING while its processes end, whatever the cause; a cancelled job has the reason None.
    if state in ("COMPLETING", "TIMEOUT", "NODE_FAIL") and fields.get("Reason") in NOBODYS_WISH:
        return Who.LIMIT
    return Who.PERSON
