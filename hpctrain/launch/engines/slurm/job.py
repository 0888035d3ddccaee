"""The Slurm job that this process runs in, from its environment."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass


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
