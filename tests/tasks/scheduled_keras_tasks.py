"""Keras tasks with their own learning rate schedule."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from hpctrain.tasks.definition import KerasTask, TorchScheduler

GIVEN: dict[str, Any] = {
    "function": lambda step: 1 / (1 + step),
    "groups": lambda step: [1.0, 2.0],
    "of_torch": TorchScheduler(lambda optimizer: optimizer),
}


def task(schedule: str = "") -> KerasTask:
    """A task with a Keras schedule in the optimizer, or with a ``schedule``."""
    random = np.random.default_rng(3)
    x = random.normal(size=(40, 4)).astype(np.float32)
    data = {"x": x, "y": x.sum(1, keepdims=True)}
    rate = keras.optimizers.schedules.ExponentialDecay(0.02, 3, 0.5) if schedule == "keras" else 0.02
    return KerasTask(
        keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)]),
        lambda output, batch: keras.ops.mean((output - batch["y"]) ** 2),
        keras.optimizers.Adam(rate),
        data,
        data,
        schedule=GIVEN.get(schedule),
    )
