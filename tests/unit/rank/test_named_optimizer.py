"""The optimizer that a run file names, for a task that has none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras  # noqa: F401 (both frameworks before the first test, whose environment is watched)
import pytest
import torch  # noqa: F401

from hpctrain.comm.world import alone
from hpctrain.config.loading import load
from hpctrain.config.sections import OPTIMIZERS
from hpctrain.errors import UserError
from hpctrain.rank.problem import make_problem

TASKS = {
    "torch": """
import torch
import numpy as np
from hpctrain import TorchTask

def task(own: bool = False):
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 3))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1) if own else None
    data = {"x": np.ones((8, 4), np.float32), "y": np.ones((8, 3), np.float32)}
    return TorchTask(model, "mse", optimizer, train=data)
""",
    "keras": """
import keras
import numpy as np
from hpctrain import KerasTask

def task(own: bool = False):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    if own:
        model.compile(keras.optimizers.SGD(0.1), loss="mse")
    return KerasTask(model, "mse", train={"x": np.ones((8, 4), np.float32), "y": np.ones((8, 3), np.float32)})
""",
}
FILE = "name: a\ntask: {task}:task\ntrain: {{steps: 1, global_batch: 4}}\noptimizer: {{name: adamw, lr: 3e-4}}\n"
SPECIAL: dict[str, list[str]] = {
    "sgd": ["--optimizer.momentum", "0.9", "--optimizer.nesterov", "true"],
    "adam": ["--optimizer.betas", "[0.5, 0.75]", "--optimizer.eps", "1e-5", "--optimizer.amsgrad", "true"],
    "rmsprop": ["--optimizer.rho", "0.5", "--optimizer.momentum", "0.5"],
    "adadelta": ["--optimizer.rho", "0.5"],
}
EXPECTED: dict[str, dict[str, Any]] = {
    "sgd": {"momentum": 0.9, "nesterov": True},
    "adam": {"betas": (0.5, 0.75), "eps": 1e-5, "amsgrad": True},
    "rmsprop": {"rho": 0.5, "momentum": 0.5},
    "adadelta": {"rho": 0.5},
}


@pytest.fixture(params=list(TASKS))
def run_file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    module = tmp_path / f"named_{request.param}_task.py"
    module.write_text(TASKS[request.param])
    path = tmp_path / "run.yaml"
    path.write_text(FILE.format(task=module))
    return path


def made(path: Path, *words: str) -> Any:
    return make_problem(load(path, words), alone()).task.optimizer


def settings(optimizer: Any) -> dict[str, Any]:
    """Under PyTorch's names, whichever framework it is of."""
    if hasattr(optimizer, "param_groups"):
        found = dict(optimizer.param_groups[0])
        return found | {"rho": found.get("alpha", found.get("rho"))}
    found = optimizer.get_config()
    return found | {
        "lr": found["learning_rate"],
        "eps": found.get("epsilon"),
        "betas": (found.get("beta_1"), found.get("beta_2")),
    }


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_names_are_those_of_the_framework(run_file, name):
    optimizer = made(run_file, "--optimizer.name", name, "--optimizer.weight_decay", "0.25", *SPECIAL.get(name, []))
    assert type(optimizer).__name__.lower() == name
    found = settings(optimizer)
    assert found["lr"] == pytest.approx(3e-4)
    assert found["weight_decay"] == 0.25
    expected: dict[str, Any] = EXPECTED.get(name, {})
    assert {key: found[key] for key in expected} == expected


def test_an_optimizer_of_the_task_and_one_of_the_run_file_are_refused(run_file):
    with pytest.raises(UserError, match="names optimizer adamw, and the task has its own, SGD"):
        made(run_file, "--task_args.own", "true")


def test_without_either_the_run_file_is_named_in_the_cure(run_file):
    run_file.write_text(run_file.read_text().replace("optimizer:", "data: {} #"))
    with pytest.raises(UserError, match="optimizer of the task is missing") as caught:
        made(run_file)
    assert "optimizer: {name: adam" in caught.value.fix


def test_parameters_that_are_not_trained_are_left_out(run_file):
    optimizer = made(run_file)
    if hasattr(optimizer, "param_groups"):
        assert [list(each.shape) for each in optimizer.param_groups[0]["params"]] == [[3, 3], [3]]
