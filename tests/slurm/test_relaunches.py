"""Jobs that lose a node or a rank are relaunched: all ranks start again each time, and none crashes on its own.

``HPCTRAIN_RELAUNCHES`` sets the number of relaunches (1 by default).
"""

from __future__ import annotations

import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hpctrain.errors import Code
from hpctrain.run.attempts import Attempts
from tests.slurm.cluster import Cluster
from tests.slurm.run import Run
from tests.support.mpi import LAUNCH_S

PROGRAM = Path(__file__).parent / "programs" / "meeting.py"
RELAUNCHES = int(os.environ.get("HPCTRAIN_RELAUNCHES", "1"))
A_JOB = 4
"""Relaunches per job; more than one, because a lost node leaves files that later attempts must cope with."""
JOBS = 4
"""Jobs that run concurrently."""
RANKS = 4
CRASHES = ("SIGSEGV", "Segmentation fault", "signal 11", "SIGBUS", "SIGABRT", "free(): ", "malloc(): ")
"""Words in the output of ranks and launchers that indicate a crash."""


def of_job(cluster: Cluster, run: Run, job: str, node: str) -> dict[int, str]:
    """Processes of a job on one node: its ranks, and the processes of Slurm and mpirun that started them."""
    inside = os.readlink(f"/proc/{cluster.init(node)}/ns/pid")
    found = cluster.processes(run.marker) | cluster.processes(f"slurmstepd: [{job}.")
    return {pid: command for pid, command in found.items() if namespace(pid) == inside}


def namespace(pid: int) -> str | None:
    """PID namespace of a process; none if it has ended."""
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return None


def lose(cluster: Cluster, run: Run, job: str, whole_node: bool) -> None:
    """Kill everything of a job on its second node, or one rank there."""
    there = of_job(cluster, run, job, "n2")
    victims = there if whole_node else [max(pid for pid, words in there.items() if PROGRAM.name in words)]
    for pid in victims:
        os.kill(pid, signal.SIGKILL)


def wait_for_meeting(run: Run, job: str, met: Path, attempt: int) -> None:
    """Wait until all ranks of an attempt have met; fail if the job ends instead."""

    def have_met() -> bool:
        assert run.cluster.state(job) not in ("FAILED", "COMPLETED"), run.log()
        return len(list(met.glob(f"{attempt}-*"))) == RANKS

    run.wait_for(have_met, LAUNCH_S)


def survive(cluster: Cluster, run: Run, met: Path, times: int) -> None:
    """Submit a job and make it relaunch, after the loss of a node and of a rank alternately."""
    job = run.submit()
    for attempt in range(1, times + 1):
        wait_for_meeting(run, job, met, attempt)
        lose(cluster, run, job, whole_node=attempt % 2 == 1)
    run.wait(job, "COMPLETED", "FAILED")
    attempts = Attempts(run.dir).all()
    assert run.verdicts() == ["requeue"] * times + ["done"], run.log()
    assert {attempt.job for attempt in attempts} == {job}
    verdicts = [attempt.verdict for attempt in attempts if attempt.verdict]
    assert {(verdict.code, verdict.host) for verdict in verdicts[:-1:2]} == {(Code.NODE, "n2")}, run.log()
    said = "\n".join([run.log(), *(verdict.reason for verdict in verdicts)])
    assert not any(crash in said for crash in CRASHES), said


@pytest.mark.timeout(180 + 60 * RELAUNCHES)
def test_no_rank_crashes_at_a_relaunch(new_run, cluster, alone, tmp_path):
    jobs = []
    for number, begin in enumerate(range(0, RELAUNCHES, A_JOB)):
        times, met = min(A_JOB, RELAUNCHES - begin), tmp_path / f"met-{number}"
        met.mkdir()
        launch = {
            "command": [sys.executable, str(PROGRAM), str(met), str(times)],
            "launcher": ("srun", "mpirun")[number % 2],
            "max_failures": times + 1,
        }
        jobs.append((new_run(launch=launch, slurm={"bad_nodes": "off"}), met, times))
    with ThreadPoolExecutor(JOBS) as pool:
        for done in [pool.submit(survive, cluster, *job) for job in jobs]:
            done.result()
