"""Faults in a job are named within seconds, and the run loses nothing and leaves nothing behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpctrain.run.attempts import Attempts
from tests.conftest import NOT_PERMITTED
from tests.slurm.cluster import Cluster, until
from tests.slurm.run import Run
from tests.support.mpi import PATIENCE_S


@pytest.fixture
def small_node(cluster: Cluster, alone: None) -> Iterator[None]:
    """Limit node n1's memory by a cgroup (version 1) that contains its daemon and all jobs on it."""
    root = Path("/sys/fs/cgroup/memory")
    folder = root / f"hpctrain-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text(str(2 * 2**30))
    except OSError as error:
        pytest.skip(f"{NOT_PERMITTED}memory control groups: {error}")
    (folder / "cgroup.procs").write_text(str(cluster.init("n1")))
    yield
    for pid in (folder / "cgroup.procs").read_text().split():
        (root / "cgroup.procs").write_text(pid)
    until(lambda: not (folder / "cgroup.procs").read_text(), PATIENCE_S)
    folder.rmdir()


def first_verdict(run: Run) -> dict[str, object]:
    """Verdict on the first attempt."""
    return dict(Attempts(run.dir).info()["attempts"][0]["verdict"])


def assert_lost(run: Run, host: str) -> None:
    """Check that the first attempt ended because a node was lost, however the ranks elsewhere ended."""
    verdict = first_verdict(run)
    assert (verdict["host"], verdict["code"]) == (host, "node"), f"{verdict}\n{run.log()}"
    assert run.cause() == "node"
    assert run.verdicts() == ["requeue", "done"], run.log()


def test_an_error_that_comes_back_ends_the_run(train):
    run = train(fault="fail", rank=2, at=3, launch={"max_failures": 2}, checkpoint={"interval": "none"})
    job = run.submit()
    run.wait(job, "FAILED")
    assert run.verdicts() == ["requeue", "do_not_requeue"]
    last = Attempts(run.dir).info()["attempts"][-1]["verdict"]
    assert (last["exit_code"], last["rank"], last["host"]) == (76, 2, "n2")
    assert "the loss went through the roof" in last["reason"]
    assert "the loss went through the roof" in run.hpctrain("logs", run.folder, "--first-error").stdout
    assert "attempts in a row failed" in run.status()["progress"]["ended"]
    assert (run.cause(1), run.cause(2)) == ("exception", "no_progress")


def test_requeues_have_a_cap_that_counts_those_by_hand(new_run):
    program = "echo begun; [ $HPCTRAIN_ATTEMPT = 1 ] && exec sleep 600; exit 75"
    run = new_run(launch={"command": ["bash", "-c", program]}, slurm={"max_requeues": 1})
    job = run.submit()
    run.wait_for(lambda: "begun" in run.log())
    run.cluster.run("scontrol", "requeue", job)
    run.wait(job, "PENDING")
    run.wait(job, "FAILED", "COMPLETED")
    assert run.verdicts() == ["requeue", "do_not_requeue"], run.log()
    assert "max_requeues 1 is used up" in Attempts(run.dir).info()["attempts"][-1]["verdict"]["reason"]


def test_a_rank_that_leaves_early_is_named(train):
    run = train(0.4, fault="exit", rank=1, at=5, launch={"max_failures": 1})  # the agents are watching by then
    job = run.submit()
    run.wait(job, "FAILED")
    verdict = first_verdict(run)
    assert verdict["rank"] == 1 and verdict["host"] == "n1", verdict
    assert run.cause() == "vanished"


def test_a_hanging_rank_ends_the_attempt(train):
    run = train(0.02, fault="hang", rank=3, at=5, launch={"max_failures": 1}, monitor={"hang_s": 10})
    job = run.submit()
    run.wait(job, "FAILED")
    hang = run.events("hang")[0]
    assert [rank["rank"] for rank in hang["ranks"]] == [3], hang
    assert run.cause() == "hang"


def test_a_step_whose_daemon_dies_ends_the_attempt(train, undisturbed):
    run = train(0.3, launch={"launcher": "srun"})  # mpirun needs no such daemon
    job = run.submit()
    run.wait_for(lambda: run.events("checkpoint_saved"))
    init = run.cluster.init("n2")
    daemons = [pid for pid, command in run.cluster.processes(f"[{job}.").items() if command.startswith("slurmstepd")]
    for pid in daemons:
        if int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1]) == init:
            os.kill(pid, signal.SIGKILL)
    run.wait(job, "PENDING")
    run.wait(job, "COMPLETED")
    assert_lost(run, "n2")
    assert run.weights() == undisturbed


def test_a_node_that_cannot_start_its_ranks_is_named_and_the_next_attempt_gets_around_it(new_run, cluster):
    run = new_run(launch={"command": ["true"], "launcher": "srun"}, slurm={"extra": ["--hold"]})
    job = run.submit()
    # A killed slurmstepd leaves the socket of its PMIx server behind. The preflight is step 0.
    (cluster.folder / "spool.n2" / f"stepd.slurm.pmix.{job}.1").touch()
    cluster.run("scontrol", "release", job)
    run.wait(job, "COMPLETED", "FAILED")
    verdict = first_verdict(run)
    assert (verdict["rank"], verdict["host"], verdict["code"]) == (2, "n2", "node"), run.log()
    assert "could not be started on n2" in str(verdict["reason"])
    assert run.verdicts() == ["requeue", "done"]


def test_a_node_that_loses_its_power(train, undisturbed, cluster, alone):
    run = train(0.3)
    job = run.submit()
    run.wait_for(lambda: run.events("checkpoint_saved"))
    cluster.kill_node("n2")
    run.wait(job, "PENDING")
    cluster.start_node("n2")
    run.wait(job, "COMPLETED")
    assert_lost(run, "n2")
    assert run.weights() == undisturbed


def test_the_wrong_mpi_type_is_caught_before_the_ranks_start(train):
    run = train(launch={"launcher": "srun"}, slurm={"mpi": "none"})
    job = run.submit()
    run.wait(job, "FAILED")
    verdict = first_verdict(run)
    assert verdict["exit_code"] == 64
    assert "each believe they are alone" in str(verdict["reason"]) and "launch.slurm.mpi: pmix" in str(verdict["fix"])
    assert not run.events("run_started")
    assert run.cause() == "singletons"


def test_another_launcher_takes_over_where_srun_does_not_fit(train):
    run = train(slurm={"mpi": "none"})
    job = run.submit()
    run.wait(job, "COMPLETED")
    assert "4 ranks on n[1-2] with mpirun" in run.log()


def test_a_read_only_scratch_is_named(train, cluster):
    scratch = cluster.folder / "scratch"
    cluster.in_node("n2", "mount", "-o", "remount,ro", scratch)
    try:
        run = train(slurm={"scratch": str(scratch)})
        job = run.submit()
        run.wait(job, "FAILED")
    finally:
        cluster.in_node("n2", "mount", "-o", "remount,rw", scratch)
    verdict = first_verdict(run)
    assert "scratch of n2 cannot be written" in str(verdict["reason"]) and "Read-only" in str(verdict["reason"])
    assert "--exclude n2" in str(verdict["fix"])
    assert run.cause() == "read_only"


def test_an_out_of_memory_kill_is_called_one(train, small_node):
    run = train(0.02, fault="eat", rank=1, at=5, launch={"max_failures": 1})
    job = run.submit()
    run.wait(job, "FAILED")
    verdict = first_verdict(run)
    assert (verdict["code"], verdict["host"]) == ("out_of_memory", "n1"), f"{verdict}\n{run.log()}"
    assert verdict["rank"] in run.may_be_named(1), f"{verdict}\n{run.log()}"
    assert run.cause() == "out_of_memory"


def test_without_slurm_one_sentence(cluster, tmp_path):
    (tmp_path / "run.yaml").write_text('name: r\nlaunch: {command: ["true"]}\n')
    (tmp_path / "runs" / "r").mkdir(parents=True)
    bare = {
        "PATH": str(Path(cluster.environment["PATH"].split(":")[0])),
        "PYTHONPATH": cluster.environment["PYTHONPATH"],
    }
    for command in ("submit", "cancel"):
        done = cluster.run("hpctrain", command, "run.yaml", check=False, env=bare, cwd=tmp_path)
        assert done.returncode == 64
        assert done.stderr.startswith("hpctrain: Slurm's ") and "not on PATH" in done.stderr, done.stderr
    assert cluster.run("hpctrain", "render", "run.yaml", env=bare, cwd=tmp_path).stdout.startswith("#!/bin/bash\n")
