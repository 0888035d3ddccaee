"""Training survives what a cluster does to a job, as docs/slurm.md promises."""

from __future__ import annotations

import pytest

from hpctrain.run.attempts import Attempts
from tests.slurm.run import STEPS, Run


def assert_trained_on_two_nodes(run: Run) -> None:
    """Check that all steps ran on 4 ranks on 2 hosts, and that status says so."""
    status = run.status()
    assert (status["state"], status["progress"]["step"]) == ("finished", STEPS), run.log()
    started = run.events("run_started")[0]
    assert (started["ranks"], started["hosts"]) == (4, ["n1", "n2"])


@pytest.mark.tour
def test_digits_on_two_nodes_with_srun(undisturbed_run):
    run = undisturbed_run.end()
    assert_trained_on_two_nodes(run)
    assert "with srun --mpi=pmix" in run.log()


def test_digits_on_two_nodes_with_mpirun(train, undisturbed):
    run = train(launch={"launcher": "mpirun"})
    run.wait(run.submit(), "COMPLETED", "FAILED")
    assert_trained_on_two_nodes(run)
    assert run.weights() == undisturbed
    # The same run, once the queue has forgotten its job:
    (run.folder / "jobs.jsonl").write_text('{"job": "999999", "time": 0, "cwd": "/", "chain": 0}\n')
    status = run.status()
    assert (status["state"], status["job_state"]) == ("finished", "UNKNOWN")
    assert status["progress"]["ended"].startswith("done after step")


def test_preempted_and_requeued_by_hand_it_goes_on(train, undisturbed):
    big = "5G"  # of a node's 8: two such jobs do not fit together
    run = train(0.5, slow_attempts=2, track={"every_steps": 1}, slurm={"partition": "scavenge", "memory": big})
    job = run.submit()
    run.wait_for(lambda: run.events("train"))
    other = run.cluster.run("sbatch", "--parsable", "--output=/dev/null", "--nodes=2", f"--mem={big}", "--wrap=true")
    run.wait(job, "PENDING")
    run.wait(other.stdout.strip(), "COMPLETED")
    assert run.events("stop_requested")[0]["by"] == "signal SIGTERM"
    saved = run.dir.newest_checkpoint_step()
    assert run.computed()[-1] == saved, "no step is computed twice"
    run.wait_for(lambda: len(Attempts(run.dir).all()) == 2 and run.events("checkpoint_saved")[-1]["step"] > saved)
    run.cluster.run("scontrol", "requeue", job)
    run.wait(job, "PENDING")
    run.wait(job, "COMPLETED", "FAILED")
    assert run.verdicts() == ["requeue", "requeue", "done"], run.log()
    assert run.events("resumed")[0]["step"] == saved
    assert run.weights() == undisturbed


def test_a_killed_rank_is_named_and_the_run_resumes(train, undisturbed, tmp_path):
    run = train(0.02, fault="kill", rank=3, at=20, once=str(tmp_path / "once"))
    job = run.submit()
    run.wait(job, "COMPLETED", "FAILED")
    first = Attempts(run.dir).info()["attempts"][0]["verdict"]
    assert (first["host"], first["action"]) == ("n2", "requeue") and first["rank"] in run.may_be_named(3), run.log()
    assert "SIGKILL" in first["reason"]
    assert run.verdicts() == ["requeue", "done"]
    assert [attempt.restarts for attempt in Attempts(run.dir).all()] == [0, 0], "in place"
    [recovered] = run.events("recovered")
    assert (recovered["rank"], recovered["host"], recovered["code"]) == (first["rank"], "n2", "killed")
    assert run.weights() == undisturbed


def test_scancel_ends_everything(train):
    run = train(1.0, track={"every_steps": 1})
    job = run.submit()
    run.wait_for(lambda: run.events("train"))
    run.hpctrain("cancel", run.folder)
    run.wait(job, "CANCELLED")
    assert run.status()["job_state"] == "CANCELLED"
    assert run.verdicts() == ["stop"], "nobody starts it again"
    run.wait_for(lambda: not run.cluster.processes(run.marker))


@pytest.mark.tour
def test_stop_saves_and_is_not_requeued(train, undisturbed):
    run = train(1.0, track={"every_steps": 1})
    job = run.submit()
    run.wait_for(lambda: run.events("train"))
    run.hpctrain("stop", run.folder)
    run.wait(job, "FAILED")  # Slurm treats every exit code except 0 as a failure; 75 means: run again
    assert run.verdicts() == ["stop"]
    assert run.dir.newest_checkpoint_step() == run.events("run_finished")[-1]["step"] < STEPS
    job = run.hpctrain("resume", run.folder, "--parsable").stdout.strip()
    run.wait(job, "COMPLETED")
    assert run.weights() == undisturbed


def test_data_is_staged_to_every_node(train, undisturbed, digits, cluster):
    scratch = cluster.folder / "scratch"  # a separate file system on each node
    run = train(launch={"stage_in": [str(digits)]}, slurm={"scratch": str(scratch)})
    job = run.submit()
    run.wait(job, "COMPLETED", "FAILED")
    assert run.weights() == undisturbed
    for node in ("n1", "n2"):
        assert "train.h5" in cluster.in_node(node, "find", scratch / f"hpctrain-{job}", "-name", "*.h5").stdout


def test_time_limit_ends_with_the_same_weights(signalled_run, undisturbed):
    run = signalled_run.end()
    assert run.verdicts() == ["requeue", "requeue", "done"], run.log()
    assert run.computed() == list(range(1, STEPS + 1)), "each step is computed once"
    assert run.weights() == undisturbed
    # A signal before the first step of an attempt leaves no event, so the verdicts are checked.
    assert run.codes() == ["time_limit", "time_limit", "completed"]
    assert {event["by"] for event in run.events("stop_requested")} <= {"signal SIGUSR1"}
    assert [run.cause(number) for number in (1, 2, 3)] == run.codes()


def test_time_limit_without_a_signal_resumes(unsignalled_run, undisturbed):
    run = unsignalled_run.end()
    assert run.verdicts() == ["requeue", "done"], run.log()
    assert run.events("resumed")
    assert run.weights() == undisturbed


def test_links_between_gpus_are_measured_before_the_ranks_start(train):
    run = train(slurm={"gpus_per_node": 2})
    run.wait(run.submit(), "COMPLETED", "FAILED")
    assert_trained_on_two_nodes(run)
    links = next((line for line in run.log().splitlines() if "preflight: links: " in line), run.log())
    assert "GB/s within a node" in links and "GB/s between nodes" in links
    assert "preflight: matrix product: " in run.log()
