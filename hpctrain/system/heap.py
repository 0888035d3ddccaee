"""Measures the cost of malloc returning freed memory to the kernel, and makes malloc keep it instead."""

from __future__ import annotations

import ctypes
import resource
import time
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from hpctrain.system.cgroups import memory_left

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Parameters of mallopt(3)."""
GIVEN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")
"""Environment variables that configure malloc, besides GLIBC_TUNABLES."""
LEAST_SHARE = 0.05
"""Smallest fraction of the time in the kernel that counts."""
LEAST_FAULTS_PER_S = 1000
"""Smallest rate of page faults that counts; with huge pages it is 2 GB/s."""


@dataclass(frozen=True)
class Usage:
    """Resources that this process has used so far."""

    seconds: float
    """Monotonic clock."""
    kernel_s: float
    """CPU time in the kernel, of all threads."""
    faults: int
    """Minor page faults."""
    peak_bytes: int
    """Peak resident memory."""

    @classmethod
    def now(cls) -> Usage:
        """Takes some microseconds."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        return cls(time.monotonic(), used.ru_stime, used.ru_minflt, used.ru_maxrss * 1024)


def kernel_share(before: Usage, after: Usage) -> float | None:
    """Fraction of the time spent in the kernel, if it is due to page faults; None if it is negligible.

    Large freed blocks go back to the kernel, which must clear the pages of the next allocation: for activations of more
    than 32 MiB, glibc does so in every step.
    """
    seconds = after.seconds - before.seconds
    share = (after.kernel_s - before.kernel_s) / seconds
    is_frequent = (after.faults - before.faults) / seconds >= LEAST_FAULTS_PER_S
    return share if is_frequent and share >= LEAST_SHARE else None


def is_given(environment: Mapping[str, str]) -> bool:
    """Whether the user has configured malloc or preloaded another one."""
    settings = (environment.get(name, "") for name in ("LD_PRELOAD", "GLIBC_TUNABLES"))
    return any("malloc" in one for one in settings) or any(name in environment for name in GIVEN)


def keep_freed() -> bool:
    """Makes malloc keep freed memory for later allocations of this process.

    Resident memory then stays at its peak or above, since blocks of different sizes leave gaps.

    Returns:
        Whether the C library supports it.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # a C library other than glibc
        return False
    return bool(mallopt(M_MMAP_MAX, 0)) and bool(mallopt(M_TRIM_THRESHOLD, -1))


def left_bytes() -> int:
    """Bytes left of the node's memory and of the control group's limit; 0 if the process has its own
    resource limit, since the distance to that is unknown."""
    limits = [resource.getrlimit(one)[0] for one in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
    if any(limit != resource.RLIM_INFINITY for limit in limits):
        return 0
    free = int(psutil.virtual_memory().available)
    left = memory_left()
    return free if left is None else min(free, left)
