"""How the cores of a node are shared by its ranks, their helpers and each other."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

HELPED_SHARE = 4
"""Cores of one rank from which on one is left to its loader, its writer and Horovod's thread."""

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TF_NUM_INTRAOP_THREADS")


def usable_cores(cgroup_root: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores this process may use: its affinity, or a container's quota where that is less."""
    cores = len(os.sched_getaffinity(0))
    quota = cpu_quota(cgroup_root)
    return cores if quota is None else max(1, min(cores, round(quota)))


def cpu_quota(cgroup_root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Cores that the control group's quota allows, none where there is no quota."""
    try:
        quota, period = (cgroup_root / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (cgroup_root / "cpu" / "cpu.cfs_quota_us").read_text().strip()
            period = (cgroup_root / "cpu" / "cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    return None if quota == "max" or int(quota) <= 0 else int(quota) / int(period)


def threads_per_rank(cores: int, ranks: int) -> int:
    """Compute threads of each of so many ranks on so many cores."""
    share = max(1, cores // ranks)
    return share - 1 if share >= HELPED_SHARE else share


def thread_environment(threads: int, given: Mapping[str, str]) -> dict[str, str]:
    """Variables that limit the compute threads of the libraries; those that the user has set stay as they are."""
    return {name: str(threads) for name in THREAD_VARIABLES if name not in given}
