"""Memory that malloc keeps for later instead of giving it back to the kernel, and what giving it back costs."""

from __future__ import annotations

import ctypes
import resource
import time
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from hpctrain.system.cgroups import memory_left

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Of mallopt(3)."""
GIVEN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")
"""Variables by which a user configures malloc, besides GLIBC_TUNABLES."""
LEAST_SHARE = 0.05
"""Of the time, spent in the kernel."""
LEAST_FAULTS_PER_S = 1000
"""Page faults, huge pages included: 2 GB/s of these."""


@dataclass(frozen=True)
class Usage:
    """What this process has had so far."""

    seconds: float
    """By a monotonic clock."""
    kernel_s: float
    """Processor time in the kernel, of all threads."""
    faults: int
    """Pages that the kernel has handed out."""
    peak_bytes: int
    """Most resident memory."""

    @classmethod
    def now(cls) -> Usage:
        """Takes some microseconds."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        return cls(time.monotonic(), used.ru_stime, used.ru_minflt, used.ru_maxrss * 1024)


def kernel_share(before: Usage, after: Usage) -> float | None:
    """Share of the time in which the kernel handed out memory; None if that is hardly any.

    Large blocks that are freed go back to the kernel, which has to clear the pages of the next ones: for activations of
    more than 32 MiB glibc does so in every step.
    """
    seconds = after.seconds - before.seconds
    share = (after.kernel_s - before.kernel_s) / seconds
    hands_out = (after.faults - before.faults) / seconds >= LEAST_FAULTS_PER_S
    return share if hands_out and share >= LEAST_SHARE else None


def is_given(environment: Mapping[str, str]) -> bool:
    """Whether the user has said what malloc is to do, or another malloc takes its place."""
    told = (environment.get(name, "") for name in ("LD_PRELOAD", "GLIBC_TUNABLES"))
    return any("malloc" in one for one in told) or any(name in environment for name in GIVEN)


def keep_freed() -> bool:
    """From now on memory that is freed stays with this process, for what it allocates next, as far as it fits.

    Resident memory stays at its peak, or above: blocks of different sizes leave gaps.

    Returns:
        Whether the C library can.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # another C library than glibc
        return False
    return bool(mallopt(M_MMAP_MAX, 0)) and bool(mallopt(M_TRIM_THRESHOLD, -1))


def left_bytes() -> int:
    """What this process and others may still fill of the node's memory, and of their control group's; 0 if the process
    has its own limit, whose distance is not known."""
    limits = [resource.getrlimit(one)[0] for one in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
    if any(limit != resource.RLIM_INFINITY for limit in limits):
        return 0
    free = int(psutil.virtual_memory().available)
    left = memory_left()
    return free if left is None else min(free, left)
