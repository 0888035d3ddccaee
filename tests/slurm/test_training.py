"""Training through everything that a cluster does to a job: the promises of docs/slurm.md."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.run import STEPS, Run


@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
def test_digits_on_two_nodes(train: Callable[..., Run], reference: dict[str, str], launcher: str) -> None:
    run = train(launch={"launcher": launcher})
    job = run.submit()
    run.wait(job, "COMPLETED")
    status = run.status()
    assert (status["state"], status["progress"]["step"]) == ("COMPLETED", STEPS)
    started = run.events("run_started")[0]
    assert (started["ranks"], started["hosts"]) == (4, ["n1", "n2"])
    assert reference.setdefault("hash", run.weights()) == run.weights()


def test_time_limit_ends_with_the_same_weights(train: Callable[..., Run], undisturbed: str) -> None:
    seconds_per_step = 0.5  # so that all steps take longer than the 18 s before the first signal
    run = train(
        seconds_per_step, slurm={"time": "1", "signal_s": 42}, track={"every_steps": 1}, checkpoint={"interval": "none"}
    )
    job = run.submit()
    run.wait(job, "COMPLETED", "FAILED", timeout=180)
    assert run.verdicts()[-1] == "done", run.log()
    assert set(run.verdicts()[:-1]) == {"requeue"}
    assert run.computed() == list(range(1, STEPS + 1)), "each step is computed once"
    assert run.weights() == undisturbed
    assert [event["by"] for event in run.events("stop_requested")] == ["signal SIGUSR1"] * (len(run.verdicts()) - 1)


def test_requeue_in_the_middle_resumes(train: Callable[..., Run], undisturbed: str) -> None:
    run = train(0.2, track={"every_steps": 1})
    job = run.submit()
    run.wait_for(lambda: run.events("checkpoint_saved"))
    run.cluster.run("scontrol", "requeue", job)
    run.wait(job, "PENDING")
    run.wait(job, "COMPLETED", timeout=90)
    assert run.verdicts()[-1] == "done"
    assert run.events("resumed")
    assert run.weights() == undisturbed


def test_a_killed_rank_is_named_and_the_run_resumes(
    train: Callable[..., Run], undisturbed: str, tmp_path: Path
) -> None:
    run = train(0.02, fault="kill", rank=3, at=20, once=str(tmp_path / "once"))
    job = run.submit()
    run.wait(job, "COMPLETED", "FAILED", timeout=90)
    first = run.dir.attempts()[0]["verdict"]
    assert (first["rank"], first["host"], first["action"]) == (3, "n2", "requeue"), run.log()
    assert "SIGKILL" in first["reason"]
    assert run.verdicts() == ["requeue", "done"]
    assert run.weights() == undisturbed


def test_scancel_ends_everything(train: Callable[..., Run]) -> None:
    run = train(0.2)
    job = run.submit()
    run.wait_for(lambda: run.events("train"))
    run.hpctrain("cancel", run.folder)
    run.wait(job, "CANCELLED", timeout=30)
    assert run.status()["state"] == "CANCELLED"
    assert run.verdicts() == ["stop"], "nobody starts it again"
    run.wait_for(lambda: not run.cluster.processes(run.marker), timeout=20)


def test_stop_saves_and_is_not_requeued(train: Callable[..., Run], undisturbed: str) -> None:
    run = train(0.2)
    job = run.submit()
    run.wait_for(lambda: run.events("train"))
    run.hpctrain("stop", run.folder)
    run.wait(job, "FAILED", timeout=30)  # Slurm calls every exit code but 0 a failure; 75 means: run me again
    assert run.verdicts() == ["stop"]
    assert run.dir.newest_checkpoint_step() == run.events("run_finished")[-1]["step"] < STEPS
    job = run.hpctrain("resume", run.folder, "--parsable").stdout.strip()
    run.wait(job, "COMPLETED")
    assert run.weights() == undisturbed


def test_data_is_staged_to_every_node(
    train: Callable[..., Run], undisturbed: str, digits: Path, cluster: Cluster
) -> None:
    scratch = cluster.folder / "scratch"  # a file system of its own on each node
    run = train(launch={"stage_in": [str(digits)]}, slurm={"scratch": str(scratch)})
    job = run.submit()
    run.wait(job, "COMPLETED", "FAILED", timeout=60)
    assert run.weights() == undisturbed
    for node in ("n1", "n2"):
        assert "train.h5" in cluster.in_node(node, "find", scratch / f"hpctrain-{job}", "-name", "*.h5").stdout
