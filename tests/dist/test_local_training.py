"""Ranks that train apart and meet for outer steps, in runs of both frameworks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import PROJECT, hpctrain, last_words
from tests.support.mpi import mpirun

PROGRAM = PROJECT / "tests/dist/programs/local_training.py"

pytestmark = pytest.mark.world_size(2)


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_means_of_weights_train_as_means_of_gradients_do(framework: str, tmp_path: Path) -> None:
    mpirun(2, PROGRAM, framework, tmp_path, env={"PYTHONPATH": str(PROJECT)}, warm=framework)
    found = {name: metrics["loss"] for name, metrics in json.loads((tmp_path / "found.json").read_text()).items()}
    exact = found.pop("every_step")
    apart = found.pop("apart")
    clipped = found.pop("clipped")
    assert found.pop("node_clipped") == pytest.approx(clipped, rel=1e-5)
    assert found == pytest.approx(dict.fromkeys(("mean", "paced", "node", "warm", "accumulated"), exact), rel=1e-5)
    for other in (apart, clipped):
        assert abs(other - exact) > 1e-4 * exact, "what is compared is sensitive to training apart, and to clipping"


@pytest.mark.parametrize("overlap", ["false", "true"])
def test_a_run_resumes_in_the_middle_of_a_round_bit_for_bit(overlap: str, tmp_path: Path) -> None:
    sync = {"kind": "local", "every_steps": "8", "after_steps": "5", "overlap": overlap}
    keys: dict[str, Any] = {
        "reduce.kind": "mpi",
        "schedule.kind": "constant",
        "train.epochs": "null",
        "train.steps": 24,
        "checkpoint.every_steps": 18,
        "monitor.enabled": "false",
        **{f"sync.{key}": value for key, value in sync.items()},
    }
    words = [word for key, value in keys.items() for word in (f"--{key}", value)]
    run = ("run", "-n", 2, PROJECT / "examples/digits-torch.yaml", *words)
    evaluated = ("--train.eval_every_steps", 3, "--train.eval_every_epochs", "null")
    hpctrain(*run, *evaluated, "--name", "straight", cwd=tmp_path, warm="torch")
    hpctrain(*run, "--name", "again", cwd=tmp_path, warm="torch")
    again = tmp_path / "runs/again"
    shutil.rmtree(again / "checkpoints/step-000000024")
    hpctrain(*run, "--name", "again", cwd=tmp_path, warm="torch")
    hpctrain("ckpt", "diff", "runs/straight", "runs/again", cwd=tmp_path)  # ends well if all tensors are equal
    words_of = [word for name in ("straight", "again") for word in last_words(tmp_path / "runs" / name)]
    assert len({word["weights_hash"] for word in words_of}) == 1
    shutil.rmtree(again / "checkpoints/step-000000024")
    united = ("--sync.kind", "every_step", "--accept", "sync", "--reduce.verify_every_steps", 1)
    hpctrain(*run, "--name", "again", *united, cwd=tmp_path, warm="torch")  # from the middle of a round
    assert len({word["weights_hash"] for word in last_words(again, 3)}) == 1
