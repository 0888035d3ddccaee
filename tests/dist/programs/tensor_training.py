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

import numpy as np
import torch

from examples import gpt as gpt_example
from hpctrain import BaseHook, HpctrainError, StepResult, Training, fit, load_config
from hpctrain.checkpoint.format import layout
from hpctrain.cli import main
from hpctrain.comm.world import connect
from tests.tasks import tensor_tasks

EVERYONE = connect().everyone
layout.LEAST_TILE_BYTES = 64  # tiles, as for large matrices


class Watcher(BaseHook):
    """Records losses of global batches, and what must be equal on all ranks."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.hashes: list[Any] = []
        self.drawn: dict[str, list[str]] = {}
        self.slots: list[int] = []
        """Elements of optimizer state on each rank, excluding step counts."""

    def after_step(self, training: Training, result: StepResult) -> None:
        total, weight = training.world.data.sum(np.array(result.sums()["loss"]), "average the loss")
        self.losses.append(float(total / weight))
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


class Drift(BaseHook):
    """Changes replicated weights on the last rank after the first step."""

    def after_step(self, training: Training, result: StepResult) -> None:
        if training.world.rank == EVERYONE.size - 1 and training.state.step == 1:
            with torch.no_grad():
                training.framework.model.norm.weight[0] += 1e-12  # type: ignore[attr-defined]


def run(folder: Path, name: str, steps: int = 6, drifts: bool = False, **keys: Any) -> dict[str, Any]:
    """One attempt of a run; in keys of the run file, __ stands for the dot."""
    watcher = Watcher()
    base = {
        "name": name,
        "task": f"{tensor_tasks.__file__}:gpt",
        "run_dir": folder / name,
        "train.steps": steps,
        "train.global_batch": 6,
        "train.accumulate": 2,
        "train.clip_norm": 0.5,
        "train.ema_decay": 0.9,
        "reduce.kind": "mpi",
        "reduce.verify_every_steps": 1,
        "monitor.enabled": "false",
        "checkpoint.interval": "none",
        "checkpoint.keep_last": 6,
        "track.every_steps": 100,
    }
    given = base | {key.replace("__", "."): value for key, value in keys.items()}
    words = [word for key, value in given.items() for word in (f"--{key}", str(value))]
    try:
        summary = fit(load_config(None, words), hooks=[Drift(), watcher] if drifts else [watcher])
    except HpctrainError as error:
        return {"error": str(error)}
    return {
        "losses": watcher.losses,
        "hashes": watcher.hashes,
        "drawn": watcher.drawn,
        "slots": watcher.slots,
        "metrics": dict(summary.metrics),
        "step": summary.step,
    }


def gpt(folder: Path, name: str, **keys: Any) -> dict[str, Any]:
    """A run of the built-in GPT task on a file of tokens."""
    data = folder / "tokens.h5"
    words = {"train": data, "validation": data, "dtype": "float64", "width": 32, "blocks": 2, "heads": 8, "kv_heads": 4}
    given = {f"task_args__{key}": value for key, value in words.items()}
    return run(folder, name, task=f"{gpt_example.__file__}:task", **given, **keys)


PLAIN = {"task_args__feed_forward": "gelu", "task_args__norm": "layer"}


def predict(folder: Path, name: str, tensor: int) -> None:
    """Predict over the validation data from the end of a run, as ``hpctrain predict`` does."""
    words = ["predict", str(folder / name / "run.yaml"), "--parallel.tensor", str(tensor)]
    assert main(words) == 0, name


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
    predict(folder, "all-four", 4)
    predict(folder, "horovod", 2)
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
    predict(folder, "adamw", 1)
    return found


if __name__ == "__main__":
    everything = (on_four_ranks if EVERYONE.size == 4 else alone)(Path(sys.argv[1]))
    if EVERYONE.rank == 0:
        print(json.dumps(everything))
