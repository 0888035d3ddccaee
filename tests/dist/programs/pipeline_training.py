"""Trains models divided into pipeline stages under several plans, one run folder each; rank 0 prints JSON.

pipeline_training.py FOLDER [UPDATES DTYPE PLAN ...]

If names of PLANS are given, it runs only those.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as param_groups

from hpctrain import StepResult, Training
from hpctrain.checkpoint.format import layout
from hpctrain.comm.world import connect
from tests.support import plan_runs
from tests.support.plan_runs import Watcher, predict
from tests.tasks import pipeline_tasks

EVERYONE = connect().everyone
torch.compile = partial(torch.compile, backend="aot_eager")  # type: ignore[assignment]  # the same graphs; no C++ compiler
layout.LEAST_TILE_BYTES = 64  # tiles, as for large matrices
WITH_NORMS: dict[str, Any] = {"task": "sequential", "task_args__norm": "true", "data__drop_last": "true"}
"""BatchNorm rejects a batch of a single sample."""
BOTH: dict[str, Any] = {"task": "staged", "parallel__pipeline": 2, "parallel__tensor": 2, "task_args__dropout": 0.5}
GATHERED: dict[str, Any] = {
    "task": "methods",
    "parallel__shard": "parameters",
    "train__recompute": "['blocks.*']",
    "reduce__kind": "auto",
    "reduce__verify_every_steps": "null",
}
LENT: dict[str, Any] = {"task": "counting", "train__global_batch": 3}
"""One rank has half of another's micro-batches; it computes the others' with it, between its own."""
COMPILED: dict[str, Any] = {
    "task": "tests.tasks.weighed_tasks:mlp",
    "task_args__width": 16,
    "task_args__depth": 4,
    "train__compile": "true",
}
PLANS: dict[str, dict[str, Any]] = {
    "alone": {},
    "tp2": {"parallel__tensor": 2},
    "tp4": {"parallel__tensor": 4},
    "pp2": {"parallel__pipeline": 2},
    "pp4": {"parallel__pipeline": 4, "train__recompute": "['blocks.*']"},
    "tp2-pp2": {"parallel__tensor": 2, "parallel__pipeline": 2},
    "zero": {"parallel__shard": "optimizer"},
    "tp2-zero": {"parallel__tensor": 2, "parallel__shard": "optimizer"},
    "fsdp": {"parallel__shard": "parameters", "train__recompute": "['blocks.*']"},
    "fsdp-tp2": {"parallel__shard": "parameters", "parallel__tensor": 2},
    "fsdp-pp2": {**GATHERED, "parallel__pipeline": 2},
    "gradients-tp2-pp2": {
        **GATHERED,
        "parallel__shard": "gradients",
        "parallel__tensor": 2,
        "parallel__pipeline": 2,
        "parallel__pipeline_chunks": 3,
    },
    "dp-nccl": {"reduce__kind": "nccl"},
    "zero-nccl": {"parallel__shard": "optimizer", "reduce__kind": "nccl"},
    "tp2-nccl": {"parallel__tensor": 2, "reduce__kind": "nccl"},
    "pp2-nccl": {"parallel__pipeline": 2, "reduce__kind": "nccl"},
    "tp2-zero-nccl": {"parallel__tensor": 2, "parallel__shard": "optimizer", "reduce__kind": "nccl"},
    "tp2-horovod": {"parallel__tensor": 2, "reduce__kind": "horovod"},
    "pp2-horovod": {"parallel__pipeline": 2, "reduce__kind": "horovod"},
}
"""Keys of the run file; the remaining ranks form the data axis."""


def counted(sum_gradients: Callable[..., Any], *given: Any, **more: Any) -> Any:
    """A sum of gradients by FSDP2."""
    SUMS.append(given)
    return sum_gradients(*given, **more)


SUMS: list[Any] = []
param_groups.foreach_reduce = partial(counted, param_groups.foreach_reduce)  # type: ignore[assignment]


class Stages(Watcher):
    """Records what each rank holds, too."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[float] = []
        self.drawn: list[dict[str, str]] = []
        self.ranks: list[Any] = []
        self.advice: list[str] = []
        self.graphs = 0
        self.sums: list[int] = []
        """Sums of gradients by FSDP2 in each update."""

    def after_step(self, training: Training, result: StepResult) -> None:
        super().after_step(training, result)
        self.sums.append(len(SUMS))
        SUMS.clear()
        if "grad_norm" in (sums := result.sums()):
            self.norms.append(sums["grad_norm"][0])
        blocks = getattr(training.framework.model, "blocks", ())  # type: ignore[attr-defined]
        own = {number: block for number, block in enumerate(blocks) if any(True for _ in block.parameters())}
        drawn = {str(number): block.drawn for number, block in own.items() if block.drawn}
        self.drawn = EVERYONE.allgather(drawn, "compare what was dropped")

    def after_fit(self, training: Training, reason: Any) -> None:
        framework, world = training.framework, training.world
        held = sum(one.numel() for one in framework.model.parameters())  # type: ignore[attr-defined]
        self.advice = list(framework.facts.advice)
        if compiler := sys.modules.get("torch._dynamo.utils"):
            self.graphs = compiler.counters["stats"]["unique_graphs"]
        own = [world.pipeline.rank, world.tensor.rank, framework.weights_hash(), held, framework.facts.reducer_name]
        self.ranks = EVERYONE.allgather(own, "compare the ranks")


def run(
    folder: Path, name: str, steps: int = 6, task: str = "gpt", drifts: bool = False, **keys: Any
) -> dict[str, Any]:
    """One attempt of a run. The last batch of an epoch has one sample."""
    base: dict[str, Any] = {
        "task": task if ":" in task else f"{pipeline_tasks.__file__}:{task}",
        "train__steps": steps,
        "train__global_batch": 7,
        "train__accumulate": 3,
        "train__clip_norm": 0.5,
        "train__ema_decay": 0.9,
        "reduce__kind": "mpi",
        "reduce__verify_every_steps": 1,
        "checkpoint__verify_replicated": "true",
        "checkpoint__keep_last": 6,
    }
    drift = [plan_runs.Drift(lambda model: next(model.parameters()))] if drifts else []
    return plan_runs.train(folder, name, Stages(), drift, **base | keys)


def on_four_ranks(folder: Path) -> dict[str, Any]:
    """Results of all scenarios, by name."""
    two: dict[str, Any] = {"parallel__pipeline": 2}
    found = {
        "pp2-dp2": run(folder, "pp2-dp2", **two, reduce__kind="horovod", monitor__enabled="true"),
        "pp4": run(folder, "pp4", parallel__pipeline=4, train__recompute="['blocks.*']"),
        "tp2-pp2": run(folder, "tp2-pp2", **two, parallel__tensor=2),
        "sharded": run(folder, "sharded", **two, parallel__shard="optimizer"),
        "gathered": run(folder, "gathered", **two, **GATHERED),
        "chunks": run(folder, "chunks", **two, parallel__pipeline_chunks=3),
        "lent": run(folder, "lent", **two, **GATHERED | LENT, parallel__pipeline_chunks=2),
        "compiled": run(folder, "compiled", 2, **two, **GATHERED | COMPILED | {"train__recompute": "[]"}),
        "held": run(folder, "held", **two, **GATHERED | {"task": "gpt"}),
        "auto": run(folder, "auto", **two, reduce__kind="auto", train__clip_norm="null"),
        "adagrad": run(folder, "adagrad", **two, task_args__optimizer="adagrad"),
        "tied": run(folder, "tied", task="tied", **two),
        "norms": run(folder, "norms", parallel__pipeline=4, train__compile="true", **WITH_NORMS),
        "fp16": run(folder, "fp16", steps=3, **two, task_args__dtype="float32", train__precision="fp16"),
        "noisy": run(folder, "noisy", steps=3, **two, task_args__dropout=0.5),
        "begun": run(folder, "noisy-again", steps=2, **two, task_args__dropout=0.5),
        "ended": run(folder, "noisy-again", steps=3, **two, task_args__dropout=0.5),
        "kept": run(folder, "kept", steps=3, **BOTH),
        "again": run(folder, "again", steps=3, **BOTH, train__recompute="['*']"),
        "again-in-parts": run(folder, "again-in-parts", steps=3, **BOTH, train__recompute="['blocks.*.*']"),
        "initial": run(folder, "initial", steps=1, **two, checkpoint__init_from=folder / "pp4"),
        "unfilled": run(
            folder, "unfilled", 1, **two | GATHERED | {"task": "without_values"}, checkpoint__init_from=folder / "pp4"
        ),
        "drifted": run(folder, "drifted", **two, drifts=True, train__clip_norm="null"),
        "astray": run(folder, "astray", steps=1, task="astray", **two),
        "few": run(folder, "few", task="sequential", parallel__pipeline=4),
    }
    predict(folder, "tp2-pp2", tensor=2, pipeline=2)
    cut = {"parallel__tensor": 2, "parallel__pipeline_chunks": 2}
    gathered = two | GATHERED | {"parallel__shard": "gradients", "parallel__pipeline_chunks": 3}
    plans: list[dict[str, Any]] = [gathered, {}, two | cut, {"parallel__pipeline": 4}]
    for step, plan in enumerate(plans, start=2):
        found[f"chain-{step}"] = run(folder, "chain", steps=step, **{"task": "methods"} | plan)
    return found


def by_plans(folder: Path, updates: int, dtype: str, names: list[str]) -> dict[str, Any]:
    """Results of plans with uneven micro-batches, clipping, weight decay of some weights only, and moving averages."""
    found = {}
    for name in names:
        own = PLANS[name]
        if own.get("parallel__shard") or EVERYONE.size == 1:
            own = own | {"reduce__kind": "auto", "reduce__verify_every_steps": "null"}
        label = f"{name}-{EVERYONE.size}"
        found[label] = run(folder, label, updates, task_args__dtype=dtype, **own)
    return found


def alone(folder: Path) -> dict[str, Any]:
    """Results of one process, which also continues what four ranks began."""
    found = {
        "alone": run(folder, "alone"),
        "alone-unclipped": run(folder, "alone-unclipped", train__clip_norm="null"),
        "alone-adagrad": run(folder, "alone-adagrad", task_args__optimizer="adagrad"),
        "alone-tied": run(folder, "alone-tied", task="tied"),
        "alone-lent": run(folder, "alone-lent", **LENT),
        "alone-eager": run(folder, "alone-eager", 2, **COMPILED | {"train__compile": "false"}),
        "alone-norms": run(folder, "alone-norms", **WITH_NORMS),
        "alone-initial": run(folder, "alone-initial", steps=1, checkpoint__init_from=folder / "alone"),
        "chain-6": run(folder, "chain", task="methods"),
    }
    predict(folder, "alone")
    return found


if __name__ == "__main__":
    given = Path(sys.argv[1])
    if sys.argv[2:]:
        everything = by_plans(given, int(sys.argv[2]), sys.argv[3], sys.argv[4:])
    else:
        everything = (on_four_ranks if EVERYONE.size == 4 else alone)(given)
    if EVERYONE.rank == 0:
        print(json.dumps(everything))
