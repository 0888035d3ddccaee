"""A small task in Keras with a fault in a callback of its training, or not a number in its data."""

from __future__ import annotations

import time

import keras
import numpy as np

from benchmarks.failures.faults import Injection
from hpctrain import BaseHook, KerasTask, World
from hpctrain.train.framework import StepResult
from hpctrain.train.hooks import Training


class Faulty(BaseHook):
    """Has the fault between two steps."""

    def __init__(self, injection: Injection, step_s: float) -> None:
        self.injection, self.step_s = injection, step_s

    def after_step(self, training: Training, result: StepResult) -> None:
        """See ``Hook``."""
        time.sleep(self.step_s)
        self.injection.due()


def task(
    world: World, fault: str = "", rank: int = 0, step: int = 0, data: str = "", lr: float = 0.01, step_s: float = 0.05
) -> KerasTask:
    """Makes the task; arguments as those of the task in PyTorch."""
    x = np.random.default_rng(1).standard_normal((64, 3), dtype=np.float32)
    y = x.sum(1)
    if data == "nan":
        x[40] = np.nan
    keras.utils.set_random_seed(0)
    net = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    hooks = [Faulty(Injection(fault, world.rank == rank, step), step_s)]
    return KerasTask(net, "mean_squared_error", keras.optimizers.SGD(lr), train={"x": x, "y": y}, hooks=hooks)
