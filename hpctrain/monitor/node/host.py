"""Evidence of slowness from a host's counters: read at a low rate, compared pairwise and put into words."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.monitor.node.gpu_readings import GpuReading, remarks
from hpctrain.run.rank_environment import RUN_DIR
from hpctrain.system import cgroups
from hpctrain.system.kernel import names_in, read_text

TICK = os.sysconf("SC_CLK_TCK")
PROC = Path("/proc")
POWER = Path("/sys/class/powercap")
NOTABLE = 0.05
"""Smallest fraction of time that is reported."""
REMARKS = {
    "throttled_s": (NOTABLE, "the control group's CPU quota throttled it for {:.0%} of the time"),
    "steal_s": (NOTABLE, "the hypervisor took {:.0%} of the processors"),
    "hot": (1, "processors throttled {:.0f} times for heat"),
    "swapped_pages": (100, "the host swaps {:.0f} pages/s"),
    "memory_pressure_s": (NOTABLE, "tasks waited {:.0%} of the time for memory"),
    "io_pressure_s": (0.2, "tasks waited {:.0%} of the time for storage"),
    "retransmits": (100, "the network retransmitted {:.0f} segments/s"),
}
"""Counters of a host: the smallest growth that is reported, per second but for ``units`` of ``compare``, and how."""


@dataclass(frozen=True)
class Reading:
    """Counters at one time. Times are seconds since boot or process start."""

    time: float
    host: Mapping[str, float]
    processes: Mapping[int, Mapping[str, float]]
    """Counters by PID."""
    gpus: Sequence[GpuReading] = ()


@dataclass(frozen=True)
class Findings:
    """What stands out between two readings, in words appended to a finding."""

    host: tuple[str, ...]
    by_pid: Mapping[int, tuple[str, ...]]
    starved: frozenset[int] = frozenset()
    """PIDs of processes that waited for a processor."""


def read(pids: Sequence[int], now: float, gpus: Sequence[GpuReading] = ()) -> Reading:
    """Takes a reading; counters that this system lacks are left out."""
    host = cpu_counters() | memory_counters() | pressure() | control_group() | network_counters() | cpu_energy()
    return Reading(now, host, {pid: process_counters(pid) for pid in pids}, gpus)


def compare(before: Reading, after: Reading) -> Findings:
    """Returns what stands out between two readings. Pure."""
    seconds = max(after.time - before.time, 1e-3)

    def grown(key: str) -> float:
        now = after.host.get(key, 0.0)
        return max(now - before.host.get(key, now), 0.0)  # 0 for a counter that could not be read before

    units = {"hot": 1.0, "steal_s": max(grown("cpu_s"), 1e-3)}
    rates = {key: grown(key) / units.get(key, seconds) for key in REMARKS}
    host = [text.format(rates[key]) for key, (least, text) in REMARKS.items() if rates[key] >= least]
    host.extend(remarks(after.gpus))
    by_pid, starved = {}, set()
    for pid, counters in after.processes.items():
        earlier = before.processes.get(pid, {})
        if lines := compare_process(earlier, counters, seconds):
            by_pid[pid] = tuple(lines)
        if share_waited(earlier, counters, seconds) >= NOTABLE:
            starved.add(pid)
    return Findings(tuple(host), by_pid, frozenset(starved))


def share_waited(before: Mapping[str, float], after: Mapping[str, float], seconds: float) -> float:
    """Fraction of the time that a process waited for a processor; 0 if unknown."""
    return (after.get("waiting_s", 0) - before.get("waiting_s", 0)) / seconds if before else 0.0


def compare_process(before: Mapping[str, float], after: Mapping[str, float], seconds: float) -> list[str]:
    """Returns what stands out about one process."""
    lines = []
    if (share := share_waited(before, after, seconds)) >= NOTABLE:
        switches = (after.get("involuntary", 0) - before.get("involuntary", 0)) / seconds
        lines.append(f"waited {share:.0%} of the time for a processor, {switches:.0f} involuntary switches/s")
    if before and (faults := (after.get("major_faults", 0) - before.get("major_faults", 0)) / seconds) >= 50:
        lines.append(f"{faults:.0f} page faults/s from disk")
    if after.get("swapped_bytes", 0) > 2**26:
        lines.append(f"{after['swapped_bytes'] / 2**30:.1f} GiB of its memory is swapped out")
    if after.get("stopped"):
        lines.append("the process was stopped by a signal")
    return lines


def cpu_counters() -> dict[str, float]:
    """CPU seconds of the host, those stolen by the hypervisor, and thermal throttling events."""
    lines = read_text(PROC / "stat").splitlines()
    if not lines:
        return {}
    fields = [int(field) / TICK for field in lines[0].split()[1:9]]
    counts = Path("/sys/devices/system/cpu").glob("cpu[0-9]*/thermal_throttle/core_throttle_count")
    hot = sum(int(read_text(file) or 0) for file in counts)
    return {"cpu_s": sum(fields), "steal_s": fields[7], "hot": float(hot)}


def memory_counters() -> dict[str, float]:
    """Pages swapped in and out since boot."""
    pairs = dict(line.split() for line in read_text(PROC / "vmstat").splitlines())
    return {"swapped_pages": float(int(pairs.get("pswpin", 0)) + int(pairs.get("pswpout", 0)))}


def pressure() -> dict[str, float]:
    """Pressure stall information: seconds in which some task waited for memory or storage."""
    found = {}
    for resource in ("memory", "io"):
        for line in read_text(PROC / "pressure" / resource).splitlines():
            if line.startswith("some"):
                found[f"{resource}_pressure_s"] = int(line.rpartition("total=")[2]) / 1e6
    return found


def control_group() -> dict[str, float]:
    """Seconds for which the CPU quota throttled the job."""
    seconds = cgroups.throttled_s()
    return {} if seconds is None else {"throttled_s": seconds}


def network_counters() -> dict[str, float]:
    """Retransmitted TCP segments."""
    lines = [line.split() for line in read_text(PROC / "net" / "snmp").splitlines() if line.startswith("Tcp:")]
    return {"retransmits": float(dict(zip(*lines, strict=True))["RetransSegs"])} if len(lines) == 2 else {}


def process_counters(pid: int) -> dict[str, float]:
    """Counters of one process; empty if it is gone. ``waiting_s`` is that of the thread that waited longest."""
    folder = PROC / str(pid)
    stat = read_text(folder / "stat").rpartition(")")[2].split()
    if not stat:
        return {}
    counters = {"major_faults": float(stat[9]), "stopped": float(stat[0] in "tT")}
    for line in read_text(folder / "status").splitlines():
        if line.startswith("VmSwap:"):
            counters["swapped_bytes"] = 1024.0 * int(line.split()[1])
    waiting, involuntary = 0, 0
    for task in names_in(folder / "task"):
        if schedule := read_text(folder / "task" / task / "schedstat").split():
            waiting = max(waiting, int(schedule[1]))
        for line in read_text(folder / "task" / task / "status").splitlines():
            if line.startswith("nonvoluntary_ctxt_switches:"):
                involuntary += int(line.split()[1])
    return {**counters, "waiting_s": waiting / 1e9, "involuntary": float(involuntary)}


def cpu_energy() -> dict[str, float]:
    """Energy of the processor packages by RAPL, where it may be read."""
    texts = [read_text(folder / "energy_uj") for folder in POWER.glob("intel-rapl:*") if folder.name.count(":") == 1]
    known = [int(text) for text in texts if text]
    return {"cpu_joules": sum(known) / 1e6} if known else {}


def energy(before: Reading, after: Reading) -> dict[str, float]:
    """Joules between two readings by part, ``cpu`` and ``gpu``, if known; a counter that wrapped counts as 0. Pure."""
    spent = {}
    if "cpu_joules" in before.host.keys() & after.host.keys():
        spent["cpu"] = max(after.host["cpu_joules"] - before.host["cpu_joules"], 0.0)
    earlier = {gpu.index: gpu.joules for gpu in before.gpus}
    pairs = [(earlier.get(gpu.index), gpu.joules) for gpu in after.gpus]
    if known := [now - then for then, now in pairs if then is not None and now is not None]:
        spent["gpu"] = max(sum(known), 0.0)
    return spent


def rivals(
    cpus: set[int], ours: set[int], seconds: float, before: Mapping[int, float], after: Mapping[int, float]
) -> list[str]:
    """Describes other processes that use at least half of one of ``cpus`` between two ``processor_seconds`` calls.

    Neither ``ours`` are named nor what else this run has started, which has its folder in the environment.
    """
    lines = []
    mark = f"{RUN_DIR}={os.environ.get(RUN_DIR)}"
    for pid, used in after.items():
        share = (used - before.get(pid, used)) / seconds
        if pid in ours or share < 0.5 or mark in read_text(PROC / str(pid) / "environ").split("\0"):
            continue
        stat = read_text(PROC / str(pid) / "stat")
        fields = stat.rpartition(")")[2].split()
        if fields and int(fields[36]) in cpus:
            name = stat[stat.find("(") + 1 : stat.rfind(")")]
            lines.append(f"process {pid} ({name}) uses {share:.0%} of a processor that the rank may use")
    return lines[:3]


def processor_seconds() -> dict[int, float]:
    """CPU seconds of every process on the host, by PID."""
    found = {}
    for name in filter(str.isdecimal, names_in(PROC)):
        fields = read_text(PROC / name / "stat").rpartition(")")[2].split()
        if fields:
            found[int(name)] = (int(fields[11]) + int(fields[12])) / TICK
    return found
