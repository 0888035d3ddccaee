"""Runs a small task with local SGD and without, in one framework; prints the last metrics as JSON.

SGD steps from equal weights are linear in the gradient: their mean is the step along the mean gradient.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain import fit
from hpctrain.comm.world import connect
from hpctrain.config.sections import CheckpointConfig, Config, MonitorConfig, ReduceConfig, SyncConfig, TrainConfig

SAMPLES, FEATURES = 64, 5
LOCAL = {"kind": "local", "every_steps": 1, "outer_lr": 1.0, "outer_momentum": 0.0}
SYNC: dict[str, dict[str, Any]] = {
    "every_step": {},
    "mean": LOCAL,
    "node": {**LOCAL, "every_steps": 50, "within": "node"},
    "node_nccl": {**LOCAL, "every_steps": 50, "within": "node"},
    "warm": {**LOCAL, "every_steps": 50, "after_steps": 8},
    "apart": {**LOCAL, "every_steps": 8},
    "apart_nccl": {**LOCAL, "every_steps": 8},
    "parts": {**LOCAL, "every_steps": 4, "outer_momentum": 0.7, "overlap": True, "after_steps": 2},
    "parts_nccl": {**LOCAL, "every_steps": 4, "outer_momentum": 0.7, "overlap": True, "after_steps": 2},
    "accumulated": LOCAL,
    "clipped": {},
    "node_clipped": {**LOCAL, "every_steps": 50, "within": "node"},
}
TRAIN: dict[str, dict[str, Any]] = {
    "accumulated": {"accumulate": 2},
    "clipped": {"clip_norm": 0.5},
    "node_clipped": {"clip_norm": 0.5},
}


def samples() -> dict[str, np.ndarray]:
    """Samples of a noisy linear law."""
    random = np.random.default_rng(0)
    x = random.normal(size=(SAMPLES, FEATURES)).astype(np.float32)
    noise = random.normal(size=SAMPLES)
    return {"x": x, "y": (x @ np.arange(FEATURES) + noise).astype(np.float32)[:, None]}


def torch_task() -> Any:
    import torch

    from hpctrain import TorchTask

    model = torch.nn.Linear(FEATURES, 1)

    def loss(outputs: Any, batch: Any) -> Any:
        return torch.nn.functional.mse_loss(outputs, batch["y"])

    return TorchTask(model, loss, torch.optim.SGD(model.parameters(), 0.05), samples(), samples())


def tensorflow_task() -> Any:
    """A model with a frozen layer that is initialized differently on each rank."""
    import keras

    from hpctrain import KerasTask

    own = keras.initializers.Identity(1.0 + connect().rank)
    frozen = keras.layers.Dense(FEATURES, use_bias=False, kernel_initializer=own, trainable=False)
    model = keras.Sequential([keras.Input((FEATURES,)), frozen, keras.layers.Dense(1)])
    return KerasTask(model, "mse", keras.optimizers.SGD(0.05), samples(), samples())


def main() -> None:
    """Run all scenarios."""
    framework, folder = sys.argv[1:]
    found = {}
    for name, sync in SYNC.items():
        config = Config(
            name="run",
            task=f"{__file__}:{framework}_task",
            run_dir=f"{folder}/{name}",
            train=TrainConfig(steps=8, global_batch=16, **TRAIN.get(name, {})),
            sync=SyncConfig(**sync),
            reduce=ReduceConfig(kind="nccl" if name.endswith("_nccl") and framework == "torch" else "mpi"),
            monitor=MonitorConfig(enabled=False),
            checkpoint=CheckpointConfig(interval="none"),
        )
        found[name] = dict(fit(config).metrics)
    Path(folder, "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
