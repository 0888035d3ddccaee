"""Quick checks before the ranks start: judges what each rank reports, and names the host of each problem."""

from __future__ import annotations

import functools
import json
import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from hpctrain.comm.speeds import MARK as MEASURED
from hpctrain.comm.speeds import Speeds
from hpctrain.comm.speeds import judge as judge_speeds
from hpctrain.errors import Code
from hpctrain.launch.engines.slurm.probe import MARK

Reports = Sequence[dict[str, Any]]

CLOCK_S = 5.0
"""Largest tolerated clock difference; beyond it, the order of events and file times is wrong."""


@dataclass(frozen=True)
class Expected:
    """What the job requested."""

    nodes: int
    ranks: int
    gpus_per_node: int = 0
    cpus_per_rank: int = 1
    mpi: bool = True
    tensor: int = 1
    """Size of the tensor groups; each group must be on one node."""


@dataclass(frozen=True)
class Fault:
    """Something that would break or slow the run."""

    what: str
    fix: str
    host: str | None = None
    launcher: bool = False
    """Whether another launcher may fix it."""
    fatal: bool = True
    code: Code = Code.PREFLIGHT


def reports(lines: Iterable[str], mark: str = MARK) -> list[dict[str, Any]]:
    """Extracts the JSON reports after ``mark`` (by default the probes') from the ranks' output."""
    found = []
    for line in lines:
        _, is_ours, rest = line.partition(mark)
        if is_ours:
            try:
                found.append(json.JSONDecoder().raw_decode(rest)[0])
            except ValueError:
                continue
    return found


def speeds(lines: Iterable[str]) -> Speeds | None:
    """Extracts the measurements of links and GPUs from the ranks' output; None if there are none."""
    return next(map(Speeds.read, reports(lines, MEASURED)), None)


def slow(found: Speeds) -> list[Fault]:
    """Returns the slow links and GPUs, for a job with GPUs; they do not end it, but a network that NCCL leaves unused
    does."""
    problems = [Fault(one.what, one.fix, one.host, fatal=one.fatal) for one in judge_speeds(found)]
    if found.device == "cpu":
        what = "the job has GPUs, and PyTorch computes on the CPUs"
        fix = "install a PyTorch for these GPUs; in a container, pass them in (apptainer exec --nv or --rocm)"
        problems.append(Fault(what, fix, fatal=False))
    return problems


def hosts_of_tasks(found: Reports) -> dict[int, str]:
    """Returns hosts by Slurm task; meaningful only if srun started the ranks."""
    return {int(report["task"]): report["host"] for report in found if report["stage"] == "host" and report.get("task")}


def judge(found: Reports, expected: Expected, hosts: Sequence[str] = ()) -> list[Fault]:
    """Returns all problems, fatal ones first.

    Args:
        found: reports of the ranks.
        expected: what the job requested.
        hosts: names of the job's nodes, to name those that did not report.
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
        problems += [*islice(_mpi(first, joined, expected), 1), *_clocks(joined)]
    return sorted(problems, key=lambda problem: not problem.fatal)


def _silent(first: Reports, expected: Expected, hosts: Sequence[str]) -> list[Fault]:
    reported = {_short(name) for report in first for name in (report["host"], report.get("node")) if name}
    silent = [host for host in hosts if _short(host) not in reported]
    if silent and first:
        fix = "look at the launcher's messages above; exclude the host if it is broken"
        return [Fault(f"no rank on {host} answered", fix, host, launcher=True, code=Code.NODE) for host in silent]
    if len(first) < expected.ranks:
        what = f"{len(first)} of {expected.ranks} ranks answered"
        return [Fault(what, "look at the launcher's messages above", launcher=True)]
    return []


def _folders(first: Reports) -> list[Fault]:
    found = {}
    for report in first:
        host = report["host"]
        if error := report["scratch_error"]:
            what = f"scratch of {host} cannot be written: {error}"
            fix = f"exclude the host (--exclude {host}), or name another folder in launch.slurm.scratch"
            found[host, "scratch"] = Fault(what, fix, host, code=_code(report, "scratch"))
        if error := report["run_dir_error"]:
            what = f"the run folder cannot be written on {host}: {error}"
            fix = "put run_dir on a file system that all nodes share and may write"
            found[host, "run"] = Fault(what, fix, host, code=_code(report, "run_dir"))
    return list(found.values())


def _code(report: Mapping[str, Any], folder: str) -> Code:
    """Returns the code for why a folder cannot be written; PREFLIGHT if there is no specific one."""
    code = Code.read(report.get(f"{folder}_code"))
    return Code.PREFLIGHT if code in (Code.EXCEPTION, Code.UNKNOWN) else code


def _devices(first: Reports, expected: Expected) -> list[Fault]:
    if not expected.gpus_per_node:
        return []
    problems = []
    for host, ranks in _by_host(first).items():
        visible = {device for report in ranks for device in report["devices"]}
        # With --gpus-per-task each rank sees one device, perhaps numbered 0 on every rank, unless UUIDs are reported.
        share = expected.gpus_per_node // max(1, len(ranks))
        private = all(name.isdigit() for name in visible) and all(len(report["devices"]) == share for report in ranks)
        if len(visible) < expected.gpus_per_node and not (private and visible):
            what = f"{host} shows {len(visible)} of {expected.gpus_per_node} GPUs"
            problems.append(Fault(what, f"exclude the host (--exclude {host}); hpctrain doctor on it says more", host))
        elif len(ranks) > 1 and not problems and any(len(report["devices"]) < len(ranks) for report in ranks):
            what = f"ranks on {host} see only their own GPUs, so NCCL may not copy between them directly"
            fix = "request GPUs per node (launch.slurm.gpu_request: gres) and without --gpu-bind: ranks take their own"
            problems.append(Fault(what, fix, host, fatal=False))
    return problems


def _cores(first: Reports, expected: Expected) -> list[Fault]:
    """Finds hosts where ranks share cores, often because the launcher bound them all to the same one."""
    problems = []
    for host, ranks in _by_host(first).items():
        cores = functools.reduce(operator.or_, (int(report["cpus"], 16) for report in ranks)).bit_count()
        if cores < len(ranks) * max(1, expected.cpus_per_rank):
            what = f"{len(ranks)} ranks on {host} share {cores} cores"
            fix = "set launch.slurm.cpus_per_rank to what the node has, or cpu_bind: none"
            problems.append(Fault(what, fix, host, fatal=False))
    return problems


def _mpi(first: Reports, joined: Reports, expected: Expected) -> Iterator[Fault]:
    """Yields problems with MPI, the most fundamental first: the others follow from it."""
    for report in joined:
        if "mpi_error" in report:
            what = f"{report['host']}: {report['mpi_error']}"
            yield Fault(what, "install hpctrain[mpi] in the job's environment", report["host"])
    if not joined:
        if first:
            fix = "try launch.launcher: mpirun, or another launch.slurm.mpi"
            yield Fault("MPI did not start on any rank", fix, launcher=True)
        return
    ranks = expected.ranks
    library = joined[0]["library"]
    sizes = {report["size"] for report in joined}
    if sizes == {1} != {ranks}:
        what = f"{len(joined)} ranks of {library} each believe they are alone"
        fix = "set launch.slurm.mpi: pmix (srun --mpi=list shows what there is), or launch.launcher: mpirun"
        reason = "srun's MPI type does not match the library"
        yield Fault(f"{what}: {reason}", fix, launcher=True, code=Code.SINGLETONS)
    if sizes != {ranks}:
        what = f"the job has {ranks} ranks but {library} sees {sorted(sizes)}"
        yield Fault(what, "try launch.launcher: mpirun", launcher=True)
    hosts = sorted({report["host"] for report in joined})
    if len(joined) != ranks:
        late = sorted({report["host"] for report in first} - {*hosts})
        where = f": ranks hang on {', '.join(late)}" if late else ""
        what = f"an allreduce over {ranks} ranks ended on {len(joined)} only{where}"
        fix = "check the network interface (UCX_NET_DEVICES, OMPI_MCA_btl_tcp_if_include)"
        yield Fault(what, fix, late[0] if late else None, launcher=True)
    for report in joined:
        if report["sum"] != ranks * (ranks - 1) // 2:
            host = report["host"]
            yield Fault(f"an allreduce over all ranks gave a wrong sum on {host}", "exclude the host", host)
    places, groups = defaultdict(list), defaultdict(set)
    for report in joined:
        places[report["host"], report["local_rank"]].append(report["rank"])
        groups[report["rank"] // expected.tensor].add(report["host"])
    for (host, local_rank), there in places.items():
        if len(there) > 1:
            what = f"ranks {there} on {host} all have local rank {local_rank}: MPI takes one node for several"
            yield Fault(what, "check that containers share the host's name and /dev/shm", host)
    if len(hosts) != expected.nodes:
        what = f"ranks run on {len(hosts)} of {expected.nodes} nodes ({', '.join(hosts)})"
        yield Fault(what, "check launch.slurm.srun_options", launcher=True)
    for group, names in sorted(groups.items()):
        if len(names) > 1:
            members = f"ranks {group * expected.tensor} to {(group + 1) * expected.tensor - 1}"
            what = f"{members}, which hold parts of a layer (parallel.tensor), are on {' and '.join(sorted(names))}"
            fix = "fill one node after the other: no --distribution other than block in launch.slurm.srun_options"
            yield Fault(what, fix, launcher=True)


def _clocks(joined: Reports) -> list[Fault]:
    """Compares clocks read right after a barrier with their median."""
    times = sorted(report["after"] for report in joined if "after" in report)
    if not times:
        return []
    right = times[len(times) // 2]
    off = {report["host"]: report["after"] - right for report in joined if abs(report["after"] - right) > CLOCK_S}
    fix = "ask the site to synchronize its clock"
    return [Fault(f"the clock of {host} is {by:+.0f} s off", fix, host, fatal=False) for host, by in off.items()]


def _by_host(first: Reports) -> dict[str, list[dict[str, Any]]]:
    found = defaultdict(list)
    for report in first:
        found[report["host"]].append(report)
    return dict(found)


def _short(host: str) -> str:
    return host.split(".")[0]
