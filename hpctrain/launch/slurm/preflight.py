"""Checks before the ranks start, in seconds: what every rank reports is judged, and what is wrong names its host."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hpctrain.launch.slurm.probe import MARK

CLOCK_S = 5.0
"""Clocks of nodes that differ by more break the order of events and file times."""


@dataclass(frozen=True)
class Expected:
    """What the job asked for."""

    nodes: int
    ranks: int
    gpus_per_node: int = 0
    cpus_per_rank: int = 1
    mpi: bool = True


@dataclass(frozen=True)
class Problem:
    """Something that would break or slow the run."""

    what: str
    fix: str
    host: str | None = None
    launcher: bool = False
    """Another launcher may cure it."""
    fatal: bool = True


def reports(lines: Iterable[str]) -> list[dict[str, Any]]:
    """The probes' reports among whatever else the ranks printed."""
    found = []
    for line in lines:
        _, mark, rest = line.partition(MARK)
        if mark:
            try:
                found.append(json.JSONDecoder().raw_decode(rest)[0])
            except ValueError:
                continue
    return found


def judge(found: Sequence[dict[str, Any]], expected: Expected, hosts: Sequence[str] = ()) -> list[Problem]:
    """All problems, the fundamental ones first.

    Args:
        found: reports of all ranks that spoke.
        expected: what the job asked for.
        hosts: names of the job's nodes, to name one that never spoke.
    """
    first = [report for report in found if report["stage"] == "host"]
    joined = [report for report in found if report["stage"] == "mpi"]
    problems = [
        *_silent(first, expected, hosts),
        *_folders(first),
        *_devices(first, expected),
        *_cores(first, expected),
    ]
    if expected.mpi:
        problems += [*_mpi(first, joined, expected), *_clocks(joined)]
    return sorted(problems, key=lambda problem: not problem.fatal)


def _silent(first: Sequence[dict[str, Any]], expected: Expected, hosts: Sequence[str]) -> list[Problem]:
    spoke = {report["host"].split(".")[0] for report in first}
    silent = [host for host in hosts if host.split(".")[0] not in spoke]
    if silent and first:
        return [
            Problem(
                f"no rank on {host} answered",
                "look at the launcher's messages above; exclude the host if it is broken",
                host,
            )
            for host in silent
        ]
    if len(first) < expected.ranks:
        return [
            Problem(
                f"{len(first)} of {expected.ranks} ranks answered",
                "look at the launcher's messages above",
                launcher=True,
            )
        ]
    return []


def _folders(first: Sequence[dict[str, Any]]) -> list[Problem]:
    found = {}
    for report in first:
        host = report["host"]
        if report["scratch_error"]:
            found[host, "scratch"] = Problem(
                f"scratch of {host} cannot be written: {report['scratch_error']}",
                f"exclude the host (--exclude {host}), or name another folder in launch.slurm.scratch", host,
            )  # fmt: skip
        if report["run_dir_error"]:
            found[host, "run"] = Problem(
                f"the run folder cannot be written on {host}: {report['run_dir_error']}",
                "put run_dir on a file system that all nodes share and may write", host,
            )  # fmt: skip
    return list(found.values())


def _devices(first: Sequence[dict[str, Any]], expected: Expected) -> list[Problem]:
    problems = []
    for host, ranks in _by_host(first).items():
        visible = {device for report in ranks for device in report["devices"]}
        # With --gpus-per-task each rank sees one device, which may be numbered 0 on each; UUIDs tell them apart.
        share = expected.gpus_per_node // max(1, len(ranks))
        private = all(name.isdigit() for name in visible) and all(len(report["devices"]) == share for report in ranks)
        if expected.gpus_per_node and len(visible) < expected.gpus_per_node and not (private and visible):
            problems.append(Problem(
                f"{host} shows {len(visible)} of {expected.gpus_per_node} GPUs",
                f"exclude the host (--exclude {host}); hpctrain doctor on it tells more", host,
            ))  # fmt: skip
    return problems


def _cores(first: Sequence[dict[str, Any]], expected: Expected) -> list[Problem]:
    """Ranks that share too few cores: a launcher that bound them all to the same ones, often."""
    problems = []
    for host, ranks in _by_host(first).items():
        cores = {core for report in ranks for core in report["cpus"]}
        if len(cores) < min(len(ranks) * expected.cpus_per_rank, len(ranks)):
            problems.append(Problem(
                f"{len(ranks)} ranks on {host} share {len(cores)} cores",
                "set launch.slurm.cpus_per_rank, or cpu_bind: none", host, fatal=False,
            ))  # fmt: skip
    return problems


def _mpi(first: Sequence[dict[str, Any]], joined: Sequence[dict[str, Any]], expected: Expected) -> list[Problem]:
    for report in joined:
        if "mpi_error" in report:
            return [
                Problem(
                    f"{report['host']}: {report['mpi_error']}",
                    "install hpctrain[mpi] in the job's environment",
                    report["host"],
                )
            ]
    if not joined:
        fix = "try launch.launcher: mpirun, or another launch.slurm.mpi"
        return [Problem("MPI did not start on any rank", fix, launcher=True)] if first else []
    sizes = {report["size"] for report in joined}
    library = joined[0]["library"]
    if sizes == {1} and expected.ranks > 1:
        return [Problem(
            f"{len(joined)} ranks of {library} each believe to be alone: srun's MPI type does not match the library",
            "set launch.slurm.mpi: pmix (srun --mpi=list shows what there is), or launch.launcher: mpirun", launcher=True,
        )]  # fmt: skip
    if sizes != {expected.ranks}:
        return [
            Problem(
                f"the job has {expected.ranks} ranks but {library} sees {sorted(sizes)}",
                "try launch.launcher: mpirun",
                launcher=True,
            )
        ]
    if len(joined) < expected.ranks:
        late = sorted({report["host"] for report in first} - {report["host"] for report in joined})
        where = f" on {', '.join(late)}" if late else ""
        return [Problem(f"an allreduce over {expected.ranks} ranks ended on {len(joined)} only: ranks hang{where}",
                        "check the network interface (UCX_NET_DEVICES, OMPI_MCA_btl_tcp_if_include)", late[0] if late else None, launcher=True)]  # fmt: skip
    wrong = [report for report in joined if report["sum"] != expected.ranks * (expected.ranks - 1) // 2]
    if wrong:
        return [
            Problem(
                f"an allreduce over all ranks gave a wrong sum on {wrong[0]['host']}",
                "exclude the host",
                wrong[0]["host"],
            )
        ]
    places = defaultdict(list)
    for report in joined:
        places[report["host"], report["local_rank"]].append(report["rank"])
    for (host, local_rank), ranks in places.items():
        if len(ranks) > 1:
            return [Problem(f"ranks {ranks} on {host} all have local rank {local_rank}: MPI takes one node for several",
                            "check that containers share the host's name and /dev/shm", host)]  # fmt: skip
    hosts = {report["host"] for report in joined}
    if len(hosts) != expected.nodes:
        return [
            Problem(
                f"ranks run on {len(hosts)} of {expected.nodes} nodes ({', '.join(sorted(hosts))})",
                "check launch.slurm.srun_options",
                launcher=True,
            )
        ]
    return []


def _clocks(joined: Sequence[dict[str, Any]]) -> list[Problem]:
    """Clocks read right after a barrier; the median is taken for right."""
    times = sorted(report["after"] for report in joined if "after" in report)
    if not times:
        return []
    middle = times[len(times) // 2]
    off = {
        report["host"]: report["after"] - middle
        for report in joined
        if abs(report.get("after", middle) - middle) > CLOCK_S
    }
    return [
        Problem(f"the clock of {host} is {seconds:+.0f} s off", "have the site synchronize it", host, fatal=False)
        for host, seconds in off.items()
    ]


def _by_host(first: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    found = defaultdict(list)
    for report in first:
        found[report["host"]].append(report)
    return dict(found)
