"""Runs of many plans that are killed and resumed, with a model that has weights without elements.

    killed_plans.py FRAMEWORK FOLDER

On two ranks each plan trains undisturbed, and again with rank 0 killed after a random update: this program then ends,
and resumes that plan when it is started again. On three ranks it continues runs that have trained all but the last
updates. FOLDER gets the results in ``<plan>.json``.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import random
import shutil
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain import KerasTask, TorchTask, columns, fit, rows
from hpctrain.checkpoint import safetensors
from hpctrain.comm.world import World, connect
from hpctrain.config.sections import (
    CheckpointConfig,
    Config,
    MonitorConfig,
    ParallelConfig,
    ReduceConfig,
    ScheduleConfig,
    SyncConfig,
    TrainConfig,
)
from hpctrain.train.hooks import BaseHook
from hpctrain.train.stateful import value_of

os.environ["KERAS_BACKEND"] = sys.argv[1]
if sys.argv[1] == "torch":
    import torch

SAMPLES, FEATURES, WIDTH = 48, 6, 8
STEPS, BATCH = 11, 12
LOCAL = {"kind": "local", "every_steps": 4}
NARROW = {"clip_norm": 0.1, "accumulate": 2}
AVERAGED = {**NARROW, "ema_decay": 0.5}
Plan = dict[str, dict[str, Any]]
TORCH_PLANS: dict[str, Plan] = {
    "local-overlap": {"sync": {**LOCAL, "overlap": True, "after_steps": 3}, "train": NARROW},
    "zero1": {"parallel": {"shard": "optimizer"}, "train": AVERAGED},
    "compiled-nccl": {"reduce": {"kind": "nccl", "bucket_bytes": 1024}, "train": {**AVERAGED, "compile": True}},
    "zero1-nccl": {"parallel": {"shard": "optimizer"}, "reduce": {"kind": "nccl"}, "train": AVERAGED},
    "local-node": {"sync": {**LOCAL, "overlap": True, "within": "node"}, "train": NARROW},
    "average": {"reduce": {"kind": "mpi", "compression": "bf16"}, "train": {"ema_decay": 0.5, "precision": "bf16"}},
    "local-nccl": {
        "sync": {**LOCAL, "overlap": True},
        "reduce": {"kind": "nccl"},
        "train": {**NARROW, "precision": "bf16"},
    },
    "fp16": {"parallel": {"shard": "optimizer"}, "train": {"precision": "fp16"}},
    "zero2": {"parallel": {"shard": "gradients", "offload": True}, "train": AVERAGED, "task": {"size": 1}},
    "tensor": {"parallel": {"tensor": 2, "shard": "optimizer"}, "task": {"cut": True}},
    "zero3": {"parallel": {"shard": "parameters"}, "train": {**AVERAGED, "precision": "bf16"}, "task": {"size": 1}},
    "pipeline": {"parallel": {"pipeline": 2, "shard": "optimizer"}, "train": NARROW},
    "frozen": {
        "parallel": {"shard": "parameters"},
        "train": NARROW,
        "task": {"frozen": True, "size": 1},
        "checkpoint": {"init_from": f"{sys.argv[2]}/base.safetensors", "init_missing": ("*",), "frozen": "source"},
    },
    "keras": {"parallel": {"shard": "parameters"}, "train": AVERAGED, "task": {"of_keras": True, "size": 1}},
}
KERAS_PLANS: dict[str, Plan] = {
    "average": {"reduce": {"kind": "mpi", "compression": "fp16"}, "train": AVERAGED},
    "local-overlap": {"sync": {**LOCAL, "overlap": True, "after_steps": 3}, "train": NARROW},
    "local": {"sync": LOCAL, "train": NARROW},
    "fp16": {"train": {**AVERAGED, "precision": "fp16"}, "task": {"dtype": "mixed_float16"}},
}
UNITED = ("local-overlap",)
"""Plans of ranks that train independently and exchange gradients in the end."""


def samples() -> dict[str, np.ndarray]:
    """Samples of a linear law."""
    x = np.random.default_rng(0).normal(size=(SAMPLES, FEATURES)).astype(np.float32)
    return {"x": x, "y": (x @ np.arange(FEATURES)).astype(np.float32)[:, None]}


def torch_task(cut: bool = False, size: int = 0, of_keras: bool = False, frozen: bool = False) -> Any:
    """A layer, a table and a vector of this size, by default without elements, and a parameter that the loss does not
    use. Evaluations draw random numbers too. Layers may be frozen, which the run file gives other weights."""
    if of_keras:
        return tensorflow_task(size=size)

    class Empty(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.table = torch.nn.Linear(WIDTH, size), torch.nn.Embedding(size, 4)
            self.vector, self.idle = (torch.nn.Parameter(torch.ones(shape)) for shape in ((size,), (3, size, 2)))

        def forward(self, x: Any) -> Any:
            noise = 0.01 * torch.rand(())
            return torch.cat([x, self.layer(x)], -1)[..., :WIDTH] + self.table.weight.sum() + self.vector.sum() + noise

    whole = torch.nn.Sequential(torch.nn.Linear(FEATURES, WIDTH), Empty())
    divided = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, WIDTH))
    model = torch.nn.Sequential(whole, divided, Empty(), torch.nn.Linear(WIDTH, 1))
    divided.requires_grad_(not frozen)
    words = {"tensor": {"1.0": columns, "1.2": rows}} if cut else {}
    return TorchTask(model, "mse", torch.optim.Adam(model.parameters(), 0.01), samples(), samples(), **words)


def tensorflow_task(dtype: str = "float32", size: int = 0) -> Any:
    """The same in Keras, on either of its backends."""
    import keras

    class Empty(keras.layers.Layer):  # type: ignore[misc]
        def build(self, shape: Any) -> None:
            shapes = (size,), (size, 4), (3, size, 2)
            self.parts = [self.add_weight(shape=shape, name=f"part_{len(shape)}") for shape in shapes]
            self.seeds = keras.random.SeedGenerator()

        def call(self, x: Any) -> Any:
            noise = 0.01 * keras.random.uniform((), dtype=x.dtype, seed=self.seeds)
            return x + sum(keras.ops.sum(one) for one in self.parts) + noise

    layers = [keras.layers.Dense(WIDTH, "tanh", dtype=dtype), Empty(dtype=dtype), keras.layers.Dense(1, dtype=dtype)]
    model = keras.Sequential([keras.Input((FEATURES,)), *layers])
    return KerasTask(model, "mse", keras.optimizers.Adam(0.01), samples(), samples())


class End(BaseHook):
    """Records hashes at the end of a run, by rank; kills rank 0 after an update, if one is given."""

    def __init__(self, killed_at: int | None = None) -> None:
        self.killed_at = killed_at
        self.weights: list[str] = []
        self.state: list[dict[str, str]] = []
        """Hashes of all that checkpoints contain, by name."""

    def after_step(self, training: Any, result: Any) -> None:
        if training.state.step == self.killed_at and training.world.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def after_fit(self, training: Any, reason: Any) -> None:
        everyone, state = training.world.everyone, training.framework.state()
        hashes = {one.name: hashlib.sha256(value_of(one).tobytes()).hexdigest()[:8] for one in state}
        self.state = everyone.allgather(hashes, "compare their state")
        self.weights = everyone.allgather(training.framework.weights_hash(True), "compare their weights")


def run(folder: Path, plan: Plan, killed_at: int | None = None, **train: Any) -> dict[str, Any]:
    """Train to the end, or resume after a kill; ``train`` adds to the plan's keys."""
    config = Config(
        name="run",
        task=f"{__file__}:{sys.argv[1]}_task",
        task_args=plan.get("task", {}),
        run_dir=str(folder),
        train=TrainConfig(steps=STEPS, global_batch=BATCH, **{**plan.get("train", {}), **train}),
        schedule=ScheduleConfig(kind="constant"),
        reduce=ReduceConfig(**plan.get("reduce", {"kind": "mpi"})),
        sync=SyncConfig(**plan.get("sync", {})),
        parallel=ParallelConfig(**plan.get("parallel", {})),
        monitor=MonitorConfig(enabled=False),
        checkpoint=CheckpointConfig(every_steps=2, accept=("sync",), **plan.get("checkpoint", {})),
    )
    end = End(killed_at)
    metrics = fit(config, hooks=[end]).metrics
    return {"loss": metrics["loss"], "weights": end.weights, "state": end.state}


def on_two(folder: Path, name: str, plan: Plan, world: World) -> None:
    """Train undisturbed, with evaluations, and killed and resumed."""
    was_killed = world.everyone.broadcast((folder / f"{name}-killed").exists(), "see what has been done")
    if not was_killed:
        straight = run(folder / f"{name}-straight", plan, eval_every_steps=3)
        if world.rank == 0:
            (folder / f"{name}.json").write_text(json.dumps({"straight": straight}))
        run(folder / f"{name}-killed", plan, random.randint(2, STEPS - 1))
    resumed = run(folder / f"{name}-killed", plan)
    if world.rank == 0:
        found = json.loads((folder / f"{name}.json").read_text())
        (folder / f"{name}.json").write_text(json.dumps({**found, "resumed": resumed}))


def on_three(folder: Path, name: str, plan: Plan, world: World) -> None:
    """Train the last updates on other ranks, all with a whole model; some runs no longer train independently."""
    run_dir = folder / f"{name}-straight"
    if world.rank == 0:
        shutil.rmtree(run_dir / f"checkpoints/step-{STEPS:09}")
    world.everyone.barrier("take the last checkpoint away")
    left = {"parallel", "sync"} if name in UNITED else {"parallel"}
    found = run(run_dir, {key: value for key, value in plan.items() if key not in left})
    if world.rank == 0:
        known = json.loads((folder / f"{name}.json").read_text())
        (folder / f"{name}.json").write_text(json.dumps({**known, "three": found}))


def main() -> None:
    """Run all plans that are not done."""
    if sys.argv[1] == "torch":
        # This backend generates no code, for which a C++ compiler takes seconds.
        torch.compile = partial(torch.compile, backend="aot_eager")
    folder, world = Path(sys.argv[2]), connect()
    if world.rank == 0 and not (base := folder / "base.safetensors").exists():
        weights = {f"1.{layer}.weight": np.eye(WIDTH, dtype=np.float32) / (1 + layer) for layer in (0, 2)}
        base.write_bytes(b"".join(safetensors.encode(weights, dict.fromkeys(weights, "float32"), {})))
    world.everyone.barrier("write the frozen weights")
    for name, plan in {"torch": TORCH_PLANS, "tensorflow": KERAS_PLANS}[sys.argv[1]].items():
        done = folder / f"{name}-done-on-{world.size}"
        if world.everyone.broadcast(done.exists(), "see what has been done"):
            continue
        if name == "keras" or sys.argv[1] == "tensorflow":
            importlib.import_module("keras")  # before the task, as hpctrain asks; it takes seconds
        (on_two if world.size == 2 else on_three)(folder, name, plan, world)
        if world.rank == 0:
            done.touch()


if __name__ == "__main__":
    main()
