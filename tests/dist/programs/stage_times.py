"""Trains a chain of uneven layers in two pipeline stages, with several settings; rank 0 prints JSON.

stage_times.py FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from hpctrain import Training
from hpctrain.comm.world import connect
from tests.support import plan_runs
from tests.support.plan_runs import Watcher
from tests.tasks import uneven_stages

EVERYONE = connect().everyone


class Passes(Watcher):
    """Records how often each layer has run, too."""

    def __init__(self) -> None:
        super().__init__()
        self.passes: list[dict[str, int]] = []

    def after_fit(self, training: Training, reason: Any) -> None:
        buffers = training.framework.model.named_buffers()  # type: ignore[attr-defined]
        own = {name: int(one) for name, one in buffers if one.numel()}
        self.passes = EVERYONE.allgather(own, "count the passes")


def run(folder: Path, name: str, steps: int = 4, **keys: Any) -> dict[str, Any]:
    """One attempt of a run."""
    base: dict[str, Any] = {
        "task": f"{uneven_stages.__file__}:task",
        "parallel__pipeline": 2,
        "train__steps": steps,
        "train__global_batch": uneven_stages.SAMPLES,
        "train__accumulate": 2,
        "track__every_steps": 2,
    }
    return plan_runs.train(folder, name, Passes(), **base | keys)


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
