"""Control groups (versions 1 and 2) and cores: this process's limits, and throttling and OOM kills in its group."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from hpctrain.system.kernel import read_text

PROC = Path("/proc")
ROOT = Path("/sys/fs/cgroup")


def cpu_quota(root: Path = ROOT) -> float | None:
    """CPU quota in cores at the mounted root, which in a container is its own group; None if there is no quota."""
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        found = " ".join(read_text(root / name) for name in names).split()
        if len(found) == 2:
            quota, period = found
            return None if quota == "max" or int(quota) <= 0 else int(quota) / int(period)
    return None


def throttled_s(proc: Path = PROC, root: Path = ROOT) -> float | None:
    """Seconds for which this process's group was throttled by its CPU quota; None if unknown."""
    unified = _counter("cpu", "cpu.stat", "throttled_usec", proc, root)
    if unified is not None:
        return unified / 1e6
    split = _counter("cpu", "cpu.stat", "throttled_time", proc, root)
    return None if split is None else split / 1e9


def oom_kills(proc: Path = PROC, root: Path = ROOT) -> int | None:
    """Number of OOM kills in this process's group; None if unknown."""
    for file in ("memory.events", "memory.oom_control"):
        if (kills := _counter("memory", file, "oom_kill", proc, root)) is not None:
            return kills
    return None


def memory_left(proc: Path = PROC, root: Path = ROOT) -> int | None:
    """Bytes left to this process's group under the strictest limit of it and its parents; None if there is no limit.

    Page cache does not count as used, since the kernel reclaims it.
    """
    left = []
    for group in _groups("memory", proc, root):
        for above in (group, *group.parents):
            if above.is_relative_to(root):
                left += [limit - used for limit, used in _limited(above)]
    return min(left, default=None)


def _limited(group: Path) -> Iterator[tuple[int, int]]:
    """Yields the limit and use of a group in bytes, if it has a limit."""
    for file, kinds in (("memory.max", ("anon", "shmem")), ("memory.limit_in_bytes", ("total_rss", "total_shmem"))):
        limit = read_text(group / file).strip()
        counts = dict(line.split() for line in read_text(group / "memory.stat").splitlines())
        if limit not in ("", "max") and counts:
            yield int(limit), sum(int(counts.get(kind, 0)) for kind in kinds)


def _counter(controller: str, file: str, key: str, proc: Path, root: Path) -> int | None:
    """Reads a counter from the first of this process's groups that has it."""
    for group in _groups(controller, proc, root):
        for line in read_text(group / file).splitlines():
            name, _, value = line.partition(" ")
            if name == key and value.strip().isdigit():
                return int(value)
    return None


def _groups(controller: str, proc: Path, root: Path) -> list[Path]:
    """Folders of this process's groups for a controller: the unified hierarchy's and version 1's."""
    found = []
    for line in read_text(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            found.append(root / path.lstrip("/"))
        elif controller in controllers.split(","):
            found += [root / name / path.lstrip("/") for name in dict.fromkeys((controllers, controller))]
    return found


HELPED_SHARE = 4
"""Cores per rank from which one core is left to the data loader, the checkpoint writer and Horovod's thread."""

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TF_NUM_INTRAOP_THREADS")
SPINNING, SPINS = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}, "10000"
"""How OpenMP's threads wait for each other. By default GNU's spin for milliseconds, which is lost where another process
has the core: on a busy machine, two threads took 40 times the time of one for a small model. Two thousand turns, some
tens of microseconds, reach from one operation to the next."""


def usable_cores() -> int:
    """Number of cores this process may use: its affinity, or the container's quota if that is less."""
    cores = len(os.sched_getaffinity(0))
    quota = cpu_quota()
    return cores if quota is None else max(1, min(cores, round(quota)))


def threads_per_rank(cores: int, ranks: int) -> int:
    """Number of compute threads per rank when ``ranks`` ranks share ``cores`` cores."""
    share = max(1, cores // ranks)
    return share - 1 if share >= HELPED_SHARE else share


def thread_environment(threads: int, given: Mapping[str, str]) -> dict[str, str]:
    """Variables that limit the libraries' compute threads, and how long these spin, except what the user has set."""
    waiting = {} if given.keys() & SPINNING else {"GOMP_SPINCOUNT": SPINS}
    return waiting | {name: str(threads) for name in THREAD_VARIABLES if name not in given}
