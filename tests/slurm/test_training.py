"""Training through everything that a cluster does to a job: the promises of docs/slurm.md."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.run import Run

TASK = f"{Path(__file__).parent}/programs/slow_digits.py:task"
STEPS = 48


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The digits as HDF5, packed once."""
    from hpctrain.tasks.digits_data import pack

    folder = tmp_path_factory.mktemp("digits")
    pack(str(folder))
    return folder


@pytest.fixture
def train(new_run: Callable[..., Run], digits: Path) -> Callable[..., Run]:
    """``train(fault=..., slurm=..., ...)`` writes the run file of a short training run."""

    def make(sleep_s: float = 0.0, **keys: Any) -> Run:
        names = ("fault", "rank", "at", "once")
        args = {"data": str(digits), "sleep_s": sleep_s, **{name: keys.pop(name) for name in names if name in keys}}
        keys.setdefault("train", {"steps": STEPS, "global_batch": 64, "eval_every_epochs": None})
        keys.setdefault("reduce", {"kind": "mpi"})
        keys.setdefault("checkpoint", {"every_steps": 8})
        return new_run(task=TASK, task_args=args, **keys)

    return make


@pytest.fixture(scope="session")
def reference() -> dict[str, str]:
    """Weights of the run that nothing disturbed, once one has ended."""
    return {}


@pytest.fixture
def undisturbed(train: Callable[..., Run], reference: dict[str, str]) -> str:
    """Hash of the weights that nothing disturbed."""
    if not reference:
        run = train()
        run.wait(run.submit(), "COMPLETED")
        reference["hash"] = weights(run)
    return reference["hash"]


def weights(run: Run) -> str:
    """The hash that all ranks agree on."""
    words = run.dir.read_words(run.dir.attempts()[-1]["attempt"])["ranks"]
    hashes = {word["weights_hash"] for word in words}
    assert len(words) == 4 and len(hashes) == 1, words
    return str(hashes.pop())


def computed(run: Run) -> list[int]:
    """Steps that any attempt reported, with repetitions: nothing is resolved here."""
    import json

    lines = [json.loads(line) for line in run.dir.events.read_text().splitlines()]
    return [event["step"] for event in lines if event["event"] == "train"]


def verdicts(run: Run) -> list[str]:
    """What followed from each attempt."""
    return [attempt["verdict"]["action"] if "verdict" in attempt else "none" for attempt in run.dir.attempts()]


@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
def test_digits_on_two_nodes(train: Callable[..., Run], reference: dict[str, str], launcher: str) -> None:
    run = train(launch={"launcher": launcher})
    job = run.submit()
    run.wait(job, "COMPLETED")
    status = run.status()
    assert (status["state"], status["progress"]["step"]) == ("COMPLETED", STEPS)
    started = run.events("run_started")[0]
    assert (started["ranks"], started["hosts"]) == (4, ["n1", "n2"])
    assert reference.setdefault("hash", weights(run)) == weights(run)


def test_time_limit_ends_with_the_same_weights(train: Callable[..., Run], undisturbed: str) -> None:
    run = train(0.5, slurm={"time": "1", "signal_s": 45}, track={"every_steps": 1}, checkpoint={"interval": "none"})
    job = run.submit()
    run.wait(job, "COMPLETED", "FAILED", timeout=180)
    assert verdicts(run)[-1] == "done", run.log()
    assert set(verdicts(run)[:-1]) == {"requeue"}
    assert computed(run) == list(range(1, STEPS + 1)), "each step is computed once"
    assert weights(run) == undisturbed
    assert [event["by"] for event in run.events("stop_requested")] == ["signal SIGUSR1"] * (len(verdicts(run)) - 1)


def test_requeue_in_the_middle_resumes(train: Callable[..., Run], undisturbed: str) -> None:
    run = train(0.2, track={"every_steps": 1})
    job = run.submit()
    run.wait_for(lambda: run.events("checkpoint_saved"))
    run.cluster.run("scontrol", "requeue", job)
    run.wait(job, "PENDING")
    run.wait(job, "COMPLETED", timeout=90)
    assert verdicts(run)[-1] == "done"
    assert run.events("resumed")
    assert weights(run) == undisturbed


def test_a_killed_rank_is_named_and_the_run_resumes(train: Callable[..., Run], undisturbed: str, tmp_path: Path) -> None:
    run = train(0.02, fault="kill", rank=3, at=20, once=str(tmp_path / "once"))
    job = run.submit()
    run.wait(job, "COMPLETED", "FAILED", timeout=90)
    first = run.dir.attempts()[0]["verdict"]
    assert (first["rank"], first["host"], first["action"]) == (3, "n2", "requeue"), run.log()
    assert "SIGKILL" in first["reason"]
    assert verdicts(run) == ["requeue", "done"]
    assert weights(run) == undisturbed


def test_scancel_ends_everything(train: Callable[..., Run]) -> None:
    run = train(0.2)
    job = run.submit()
    run.wait_for(lambda: run.events("train"))
    run.hpctrain("cancel", run.folder)
    run.wait(job, "CANCELLED", timeout=30)
    assert run.status()["state"] == "CANCELLED"
    run.wait_for(lambda: not run.cluster.processes(run.marker), timeout=20)


def test_stop_saves_and_is_not_requeued(train: Callable[..., Run], undisturbed: str) -> None:
    run = train(0.2)
    job = run.submit()
    run.wait_for(lambda: run.events("train"))
    run.hpctrain("stop", run.folder)
    run.wait(job, "FAILED", timeout=30)  # Slurm calls every exit code but 0 a failure; 75 means: run me again
    assert verdicts(run) == ["stop"]
    assert run.dir.newest_checkpoint_step() == run.events("run_finished")[-1]["step"] < STEPS
    job = run.hpctrain("resume", run.folder, "--parsable").stdout.strip()
    run.wait(job, "COMPLETED")
    assert weights(run) == undisturbed
