"""Runs of one model under many plans, by one launch of a program: how its ranks train, and how tests compare runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpctrain import BaseHook, CheckpointStore, HpctrainError, StepResult, Training, fit, load_config
from hpctrain.cli import main

STATE = ("model/", "optimizer/", "ema/")
"""What the names of arrays begin with that must not depend on the plan."""
QUIET = {"monitor.enabled": "false", "checkpoint.interval": "none", "track.every_steps": 100}
"""Keys of all runs."""


class Watcher(BaseHook):
    """Records losses of global batches; its attributes are results of a run."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def after_step(self, training: Training, result: StepResult) -> None:
        total, weight = training.world.data.sum(np.array(result.sums()["loss"]), "average the loss")
        self.losses.append(float(total / weight))


class Drift(BaseHook):
    """Changes one of the weights that ``of`` gets from the model, on the last rank after the first step."""

    def __init__(self, of: Callable[[Any], Any]) -> None:
        self.of = of

    def after_step(self, training: Training, result: StepResult) -> None:
        if training.world.rank == training.world.size - 1 and training.state.step == 1:
            self.of(training.framework.model).data.view(-1)[0] += 1e-12  # type: ignore[attr-defined]


def train(folder: Path, name: str, watcher: Watcher, hooks: Sequence[BaseHook] = (), **keys: Any) -> dict[str, Any]:
    """One attempt of a run; returns what the watcher saw, or an error. In keys of the run file, __ means a dot."""
    given = {"name": name, "run_dir": folder / name, **QUIET}
    given |= {key.replace("__", "."): value for key, value in keys.items()}
    words = [word for key, value in given.items() for word in (f"--{key}", str(value))]
    try:
        summary = fit(load_config(None, words), hooks=[*hooks, watcher])
    except HpctrainError as error:
        return {"error": str(error)}
    return {**vars(watcher), "metrics": dict(summary.metrics), "step": summary.step}


def predict(folder: Path, name: str, **parallel: int) -> None:
    """Predict over the validation data from the end of a run, as ``hpctrain predict`` does, under another plan."""
    keys = [word for key, size in parallel.items() for word in (f"--parallel.{key}", str(size))]
    assert main(["predict", str(folder / name / "run.yaml"), *keys]) == 0, name


def predictions(folder: Path, name: str) -> Any:
    """Outputs that ``predict`` has written."""
    with h5py.File(folder / name / "predictions.h5") as file:
        return file["output"][...]


def state_of(folder: Path, name: str, step: int) -> dict[str, Any]:
    """Weights, averages and optimizer state of a checkpoint, each assembled."""
    arrays = CheckpointStore(folder / name / "checkpoints").load(step).arrays
    return {key: arrays[key] for key in arrays if key.startswith(STATE)}


def require_same_state(folder: Path, name: str, of: str, step: int = 6, least: int = 15) -> None:
    """Check that two runs' states agree to 1e-12, and have more than ``least`` arrays."""
    found, wanted = (state_of(folder, one, step) for one in (name, of))
    assert found.keys() == wanted.keys() and len(wanted) > least
    for key in wanted:
        np.testing.assert_allclose(found[key], wanted[key], rtol=0, atol=1e-12, err_msg=key)


def require_near(ones: Any, others: Any) -> None:
    """Check that losses or outputs agree to 1e-12."""
    np.testing.assert_allclose(ones, others, rtol=0, atol=1e-12)
