"""Trains a small GPT under several plans, one run folder each; rank 0 prints JSON.

tensor_training.py FOLDER
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

from examples import gpt as gpt_example
from hpctrain import StepResult, Training
from hpctrain.checkpoint.format import layout
from hpctrain.comm.world import connect
from tests.support import plan_runs
from tests.support.plan_runs import Watcher, predict
from tests.tasks import tensor_tasks

EVERYONE = connect().everyone
layout.LEAST_TILE_BYTES = 64  # tiles, as for large matrices


class Equals(Watcher):
    """Records what must be equal on all ranks, too."""

    def __init__(self) -> None:
        super().__init__()
        self.hashes: list[Any] = []
        self.drawn: dict[str, list[str]] = {}
        self.slots: list[int] = []
        """Elements of optimizer state on each rank, excluding step counts."""

    def after_step(self, training: Training, result: StepResult) -> None:
        super().after_step(training, result)
        block = training.framework.model.blocks[0]  # type: ignore[attr-defined]
        for place, dropped in vars(block).get("drawn", {}).items():
            bits = "".join(map(str, dropped.flatten().int().tolist()))
            self.drawn[place] = EVERYONE.allgather(bits, "compare what was dropped")

    def after_fit(self, training: Training, reason: Any) -> None:
        framework = training.framework
        both = [framework.weights_hash(), framework.weights_hash(shared_only=True)]
        self.hashes = EVERYONE.allgather(both, "compare the weights")
        kept = [one for one in framework.state() if one.name.startswith("optimizer/") and one.shape]
        self.slots = EVERYONE.allgather(sum(math.prod(one.shape) for one in kept), "compare their slots")


def run(folder: Path, name: str, steps: int = 6, drifts: bool = False, **keys: Any) -> dict[str, Any]:
    """One attempt of a run."""
    base: dict[str, Any] = {
        "task": f"{tensor_tasks.__file__}:gpt",
        "train__steps": steps,
        "train__global_batch": 6,
        "train__accumulate": 2,
        "train__clip_norm": 0.5,
        "train__ema_decay": 0.9,
        "reduce__kind": "mpi",
        "reduce__verify_every_steps": 1,
        "checkpoint__keep_last": 6,
    }
    drift = [plan_runs.Drift(lambda model: model.norm.weight)] if drifts else []
    return plan_runs.train(folder, name, Equals(), drift, **base | keys)


def gpt(folder: Path, name: str, **keys: Any) -> dict[str, Any]:
    """A run of the built-in GPT task on a file of tokens."""
    data = folder / "tokens.h5"
    words = {"train": data, "validation": data, "dtype": "float64", "width": 32, "blocks": 2, "heads": 8, "kv_heads": 4}
    given = {f"task_args__{key}": value for key, value in words.items()}
    return run(folder, name, task=f"{gpt_example.__file__}:task", **given, **keys)


PLAIN = {"task_args__feed_forward": "gelu", "task_args__norm": "layer"}


def on_four_ranks(folder: Path) -> dict[str, Any]:
    """Results of all scenarios, by name."""
    cut = {"parallel__tensor": 2}
    both = cut | {"parallel__shard": "optimizer"}
    found = {
        "sharded": run(folder, "sharded", **both),
        "sharded-fused": run(folder, "sharded-fused", **both, task_args__optimizer="fused"),
        "sharded-adagrad": run(folder, "sharded-adagrad", **both, task_args__optimizer="adagrad"),
        "sharded-inner-norm": run(folder, "sharded-inner-norm", **both, task_args__inner_norm="true"),
        "horovod": run(folder, "horovod", **cut, reduce__kind="horovod", monitor__enabled="true"),
        "auto": run(folder, "auto", **cut, reduce__kind="auto", task_args__optimizer="fused"),
        "all-four": run(folder, "all-four", parallel__tensor=4),
        "adagrad": run(folder, "adagrad", **cut, task_args__optimizer="adagrad"),
        "bf16": run(folder, "bf16", **cut, steps=3, task_args__dtype="float32", train__precision="bf16"),
        "noisy": run(folder, "noisy", **cut, steps=3, task_args__dropout=0.5),
        "begun": run(folder, "noisy-again", **cut, steps=2, task_args__dropout=0.5),
        "ended": run(folder, "noisy-again", **cut, steps=3, task_args__dropout=0.5),
        "initial": run(folder, "initial", **cut, steps=1, checkpoint__init_from=folder / "all-four"),
        "inner-norm": run(folder, "inner-norm", **cut, task_args__inner_norm="true"),
        "ungathered": run(folder, "ungathered", **cut, task_args__gathers="false"),
        "drifted": run(folder, "drifted", **cut, drifts=True, train__clip_norm="null"),
        "uneven": run(folder, "uneven", parallel__tensor=3),
        "part": run(folder, "part", task=f"{tensor_tasks.__file__}:part_of_classes", **cut),
    }
    found["gpt-2"] = gpt(folder, "gpt-2", **cut, task_args__tied="true")
    found["gpt-4"] = gpt(folder, "gpt-4", parallel__tensor=4, **PLAIN)
    found["gpt-stages"] = gpt(folder, "gpt-stages", **cut, parallel__pipeline=2, **PLAIN)
    predict(folder, "all-four", tensor=4)
    predict(folder, "horovod", tensor=2)
    for step, tensor in enumerate((2, 4, 1, 2), start=2):
        found[f"chain-{step}"] = run(folder, "chain", steps=step, parallel__tensor=tensor)
    for step, (tensor, shard) in enumerate(((2, True), (4, False), (2, True), (1, True), (2, True)), start=1):
        keys = {"parallel__tensor": tensor, "parallel__shard": "optimizer" if shard else "none"}
        found[f"sharded-chain-{step}"] = run(folder, "sharded-chain", steps=step, **keys)
    if EVERYONE.rank == 0:
        shutil.copytree(folder / "sharded-chain", folder / "sharded-fork")
    EVERYONE.allgather(None, "wait for the copy")
    found["sharded-fork-6"] = run(folder, "sharded-fork")
    return found


def alone(folder: Path) -> dict[str, Any]:
    """Results of one process, which also continues what four ranks began."""
    found = {
        "adamw": run(folder, "adamw"),
        "alone-adagrad": run(folder, "alone-adagrad", task_args__optimizer="adagrad"),
        "alone-initial": run(folder, "alone-initial", steps=1, checkpoint__init_from=folder / "adamw"),
        "chain-6": run(folder, "chain"),
        "sharded-chain-6": run(folder, "sharded-chain"),
    }
    found["gpt"] = gpt(folder, "gpt", task_args__tied="true")
    found["gpt-plain"] = gpt(folder, "gpt-plain", **PLAIN)
    predict(folder, "adamw", tensor=1)
    return found


if __name__ == "__main__":
    everything = (on_four_ranks if EVERYONE.size == 4 else alone)(Path(sys.argv[1]))
    if EVERYONE.rank == 0:
        print(json.dumps(everything))
