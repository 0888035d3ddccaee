"""Trains a chain of uneven layers in two pipeline stages, with several settings; rank 0 prints JSON.

stage_times.py FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain import BaseHook, HpctrainError, StepResult, Training, fit, load_config
from hpctrain.comm.world import connect
from tests.tasks import uneven_stages

EVERYONE = connect().everyone


class Watcher(BaseHook):
    """Records losses, and how often each layer has run."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.passes: list[dict[str, int]] = []

    def after_step(self, training: Training, result: StepResult) -> None:
        total, weight = training.world.data.sum(np.array(result.sums()["loss"]), "average the loss")
        self.losses.append(float(total / weight))

    def after_fit(self, training: Training, reason: Any) -> None:
        buffers = training.framework.model.named_buffers()  # type: ignore[attr-defined]
        own = {name: int(one) for name, one in buffers if one.numel()}
        self.passes = EVERYONE.allgather(own, "count the passes")


def run(folder: Path, name: str, steps: int = 4, **keys: Any) -> dict[str, Any]:
    """One attempt of a run; in keys of the run file, __ stands for the dot."""
    watcher = Watcher()
    base = {
        "name": name,
        "task": f"{uneven_stages.__file__}:task",
        "run_dir": folder / name,
        "parallel.pipeline": 2,
        "train.steps": steps,
        "train.global_batch": uneven_stages.SAMPLES,
        "train.accumulate": 2,
        "monitor.enabled": "false",
        "checkpoint.interval": "none",
        "track.every_steps": 2,
    }
    given = base | {key.replace("__", "."): value for key, value in keys.items()}
    try:
        fit(
            load_config(None, [word for key, value in given.items() for word in (f"--{key}", str(value))]),
            hooks=[watcher],
        )
    except HpctrainError as error:
        return {"error": str(error)}
    return vars(watcher)


def main(folder: Path) -> dict[str, Any]:
    """Results of all scenarios, by name."""
    noisy: dict[str, Any] = {"task_args__dropout": 0.5}
    found = {
        "timed": run(folder, "timed"),
        "noisy": run(folder, "noisy", **noisy),
        "begun": run(folder, "again", steps=2, **noisy),
        "given": run(folder, "given", task_args__given="[4, 2]"),
        "three": run(folder, "three", task_args__given="[2, 2, 2]"),
    }
    os.environ[uneven_stages.SLOW] = str(uneven_stages.LAYERS - 1)
    return {**found, "ended": run(folder, "again", **noisy), "other": run(folder, "other", steps=1)}


if __name__ == "__main__":
    everything = main(Path(sys.argv[1]))
    if EVERYONE.rank == 0:
        print(json.dumps(everything))
