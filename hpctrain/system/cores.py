"""How the cores of a node are shared by its ranks, their helpers and each other."""

from __future__ import annotations

import os
from collections.abc import Mapping

from hpctrain.system.cgroups import cpu_quota

HELPED_SHARE = 4
"""Cores of one rank from which on one is left to its loader, its writer and Horovod's thread."""

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TF_NUM_INTRAOP_THREADS")


def usable_cores() -> int:
    """Cores this process may use: its affinity, or a container's quota if that is less."""
    cores = len(os.sched_getaffinity(0))
    quota = cpu_quota()
    return cores if quota is None else max(1, min(cores, round(quota)))


def threads_per_rank(cores: int, ranks: int) -> int:
    """Compute threads of each rank, for a number of ranks on a number of cores."""
    share = max(1, cores // ranks)
    return share - 1 if share >= HELPED_SHARE else share


def thread_environment(threads: int, given: Mapping[str, str]) -> dict[str, str]:
    """Variables that limit the compute threads of the libraries; those that the user has set stay as they are."""
    return {name: str(threads) for name in THREAD_VARIABLES if name not in given}
