"""What the ranks' reports mean."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
from collections.abc import Callable
from typing import Any

import pytest

from hpctrain.comm.speeds import Speeds
from hpctrain.launch.engines.slurm import probe
from hpctrain.launch.engines.slurm.preflight import Expected, Fault, hosts_of_tasks, judge, reports, slow, speeds
from hpctrain.launch.engines.slurm.probe import MARK

EXPECTED = Expected(nodes=2, ranks=4, gpus_per_node=2, cpus_per_rank=2)
HOSTS = ["n1", "n2"]
Reports = list[dict[str, Any]]


def healthy() -> Reports:
    """Two nodes, two ranks each, two GPUs each."""
    first = [
        {"stage": "host", "host": f"n{node}", "pid": rank, "cpus": "f", "devices": ["a", "b"],
         "run_dir_error": None, "scratch_error": None}
        for rank, node in enumerate((1, 1, 2, 2))
    ]  # fmt: skip
    joined = [
        {"stage": "mpi", "host": f"n{node}", "pid": rank, "rank": rank, "size": 4, "local_rank": rank % 2,
         "sum": 6, "after": 100.0, "library": "Open MPI v5"}
        for rank, node in enumerate((1, 1, 2, 2))
    ]  # fmt: skip
    return [*first, *joined]


def change(**fields: Any) -> Callable[[Reports], Reports]:
    """A fault: the reports of rank 3, which runs on n2, say something else."""

    def apply(found: Reports) -> Reports:
        for report in found:
            if report["pid"] == 3:
                report.update({key: value for key, value in fields.items() if key in report})
        return found

    return apply


def test_slurms_names_of_nodes_may_be_others_than_their_hosts():
    found = [{**report, "node": {"n1": "gpu-1", "n2": "gpu-2"}[report["host"]]} for report in healthy()]
    assert judge(found, EXPECTED, ["gpu-1", "gpu-2"]) == []


def test_srun_keeps_a_report_together(monkeypatch, tmp_path):
    said: list[dict[str, Any]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(1024)))
    monkeypatch.setattr(probe, "devices", lambda: [f"GPU-{number:036}" for number in range(8)])
    monkeypatch.setattr(probe, "say", said.append)
    monkeypatch.setattr("sys.argv", ["probe", "--run-dir", str(tmp_path)])
    probe.main()
    assert len(MARK + json.dumps(said[0])) < 1024, "slurmstepd cuts longer lines, and those of nodes mix"


def test_a_healthy_job_has_no_problems():
    assert judge(healthy(), EXPECTED, HOSTS) == []


@pytest.mark.parametrize(
    ("fault", "host", "what"),
    [
        (
            change(scratch_error="/scratch: Read-only file system"),
            "n2",
            "scratch of n2 cannot be written: /scratch: Read-only",
        ),
        (change(run_dir_error="/runs: Permission denied"), "n2", "run folder cannot be written on n2"),
        (change(sum=5), "n2", "wrong sum on n2"),
        (change(local_rank=0), "n2", r"ranks \[2, 3\] on n2 all have local rank 0"),
        (lambda found: [report for report in found if report["host"] == "n1"], "n2", "no rank on n2 answered"),
        (lambda found: [r for r in found if not (r["stage"] == "mpi" and r["host"] == "n2")], "n2", "ranks hang on n2"),
    ],
)
def test_a_broken_host_is_named(fault, host, what):
    problem = judge(fault(healthy()), EXPECTED, HOSTS)[0]
    assert problem.host == host and problem.fatal
    assert __import__("re").search(what, problem.what), problem.what


def test_a_host_with_fewer_gpus_is_named():
    found = healthy()
    for report in found:
        if report["host"] == "n2" and report["stage"] == "host":
            report["devices"] = ["a"]
    problem = judge(found, EXPECTED, HOSTS)[0]
    assert (problem.host, problem.what) == ("n2", "n2 shows 1 of 2 GPUs")


def test_private_devices_are_no_missing_ones():
    found = healthy()
    for report in found:
        if report["stage"] == "host":
            report["devices"] = ["0"]
    (warned,) = judge(found, EXPECTED, HOSTS)
    assert not warned.fatal and warned.what.startswith("ranks on n1 see only their own GPUs"), "once for all hosts"


def test_singletons_are_the_launchers_fault():
    found = healthy()
    for report in found:
        report.update({"rank": 0, "size": 1, "local_rank": 0, "sum": 0} if report["stage"] == "mpi" else {})
    problem = judge(found, EXPECTED, HOSTS)[0]
    assert problem.launcher and "each believe they are alone" in problem.what and "launch.slurm.mpi" in problem.fix


def test_a_launcher_that_starts_nothing():
    problem = judge([], EXPECTED, HOSTS)[0]
    assert problem.launcher and "0 of 4 ranks answered" in problem.what


def test_mpi_that_starts_nowhere_may_be_the_launcher():
    problem = judge([report for report in healthy() if report["stage"] == "host"], EXPECTED, HOSTS)[0]
    assert problem.launcher


def test_missing_mpi4py_is_not():
    found = [
        report if report["stage"] == "host" else {**report, "mpi_error": "mpi4py cannot be imported"}
        for report in healthy()
    ]
    problem = judge(found, EXPECTED, HOSTS)[0]
    assert not problem.launcher and "hpctrain[mpi]" in problem.fix


def test_clocks_and_shared_cores_are_told_but_not_fatal():
    found = change(after=190.0)(healthy())
    for report in found:
        if report["stage"] == "host" and report["host"] == "n1":
            report["cpus"] = "1"
    problems = judge(found, EXPECTED, HOSTS)
    assert [problem.fatal for problem in problems] == [False, False]
    assert {problem.host for problem in problems} == {"n1", "n2"}


def test_fatal_problems_come_first():
    found = change(after=190.0, scratch_error="x: full")(healthy())
    assert [problem.fatal for problem in judge(found, EXPECTED, HOSTS)] == [True, False]


def test_hosts_of_tasks():
    found = healthy()
    for report in found:
        report["task"] = str(report["pid"])
    assert hosts_of_tasks(found) == {0: "n1", 1: "n1", 2: "n2", 3: "n2"}
    assert hosts_of_tasks(healthy()) == {}


def test_judging_changes_nothing():
    found = healthy()
    before = copy.deepcopy(found)
    judge(found, EXPECTED, HOSTS)
    assert found == before


def test_reports_are_found_among_other_output():
    line = MARK + json.dumps({"stage": "host", "host": "n1"})
    assert (
        reports(["noise", f"[1] {line}", f"{line} trailing", MARK + "{torn", ""])
        == [{"stage": "host", "host": "n1"}] * 2
    )


@pytest.mark.parametrize(
    ("tensor", "order", "torn"), [(2, (0, 1, 2, 3), None), (2, (0, 2, 1, 3), "ranks 0 to 1"), (1, (0, 2, 1, 3), None)]
)
def test_ranks_that_share_out_layers_on_two_nodes_are_found(tensor, order, torn):
    """As a site that deals out ranks in turn would start them; another launcher may not."""
    found = healthy()
    for report, rank in zip(found[4:], order, strict=True):
        report["rank"] = rank
    problems = judge(found, dataclasses.replace(EXPECTED, tensor=tensor), HOSTS)
    if torn is None:
        assert problems == []
        return
    [problem] = problems
    assert problem.what == f"{torn}, which hold parts of a layer (parallel.tensor), are on n1 and n2"
    assert problem.fatal and problem.launcher and "--distribution" in problem.fix


def test_what_is_slow_is_told_and_an_unused_network_is_fatal():
    links = {"device": "cuda", "within": {"n1": 200.0}, "between": [("n1", "n2", 0.5)]}
    line = f"srun: starting\nhpctrain-speeds {json.dumps({**links, 'network': 'Socket', 'fabrics': {'n1': 'EFA'}})}\n"
    found = speeds(line.splitlines())
    assert found is not None and speeds(["no line"]) is None
    sockets, link = slow(found)
    assert sockets.fatal and not sockets.launcher and "aws-ofi-nccl" in sockets.fix
    assert link == Fault("n1 and n2 exchange at 0.5 GB/s, less than 1", link.fix, fatal=False)


def test_ranks_that_compute_on_the_cpus_of_a_job_with_gpus_are_told():
    """A container without them has no device file either, by which a rank would notice."""
    [unused] = slow(Speeds("cpu"))
    assert not unused.fatal and "--nv" in unused.fix
