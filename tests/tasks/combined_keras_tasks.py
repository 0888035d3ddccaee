"""A Keras task that uses the features it is given by name."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from hpctrain.config.features import Feature
from hpctrain.tasks.definition import KerasTask, TorchScheduler
from tests.tasks.combined_tasks import SAMPLES, Halved, training_data


class Trained(keras.Model):
    """A model with its own ``train_step``."""

    def __init__(self, network: keras.Model) -> None:
        super().__init__()
        self.network = network

    def call(self, x: Any, training: bool = False) -> Any:
        return self.network(x, training=training)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            error = loss(self(x, training=True), {"y": y})
        gradients = tape.gradient(error, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        return {"loss": error}


class Tested(Trained):
    """A model that also has its own ``test_step``."""

    def test_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        return {"loss": loss(self(x), {"y": y})}


def loss(outputs: Any, batch: dict[str, Any]) -> Any:
    """Mean squared error over the samples."""
    return ops.mean((ops.cast(outputs, "float32") - batch["y"]) ** 2)


def task(uses: list[str]) -> KerasTask:
    """A task with the features of these names."""
    has = {Feature[name] for name in uses}
    looks_up = bool(has & {Feature.ACCUMULATE, Feature.TRAIN_STEP})  # whether the model has a large embedding table
    if Feature.OWN_PRECISION in has:
        keras.config.set_dtype_policy("float32")
    images: list[Any] = [keras.Input((4, 4, 2)), layers.Conv2D(3, 3)]
    words: list[Any] = [keras.Input((5,), dtype="int32"), layers.Embedding(2**14, 2**4)]
    network = keras.Sequential(
        [
            *(words if looks_up else images),
            layers.BatchNormalization(synchronized=Feature.JOINT_LAYERS in has),
            layers.Flatten(),
            layers.Dense(1),
        ]
    )
    rate = keras.optimizers.schedules.ExponentialDecay(0.01, 3, 0.5) if Feature.KERAS_SCHEDULE in has else 0.01
    optimizer = keras.optimizers.SGD(rate)
    model = network
    if Feature.TRAIN_STEP in has:
        model = (Tested if Feature.TEST_STEP in has else Trained)(network)
        model.compile(optimizer=optimizer)
    random = np.random.default_rng(3)
    looked_up, seen = random.integers(0, 2**14, (SAMPLES, 5)), random.normal(size=(SAMPLES, 4, 4, 2))
    data = {
        "x": looked_up.astype(np.int32) if looks_up else seen.astype(np.float32),
        "y": random.normal(size=(SAMPLES, 1)).astype(np.float32),
    }
    made: dict[str, Any] = {"model": model, "train": training_data(has, data)}
    made |= {} if Feature.NO_VALIDATION in has else {"validation": data}
    made |= {"optimizer": optimizer} if Feature.TRAIN_STEP not in has else {}
    made |= {"optimizer": keras.optimizers.SGD(0.01)} if Feature.OTHER_OPTIMIZER in has else {}
    made |= {"optimizer": keras.optimizers.LossScaleOptimizer(optimizer)} if Feature.LOSS_SCALE in has else {}
    made |= {} if has & {Feature.NO_EVAL_LOSS, Feature.TEST_STEP} else {"loss": loss}
    made |= {"metrics": {"loss_again": loss}} if Feature.METRICS in has else {}
    made |= {"sampler": lambda epoch: np.arange(SAMPLES)} if Feature.SAMPLER in has else {}
    made |= {"schedule": lambda step: 0.5} if Feature.TASK_SCHEDULE in has else {}
    made |= {"schedule": lambda step: [0.5]} if Feature.GROUP_RATES in has else {}
    made |= {"schedule": TorchScheduler(lambda each: each)} if Feature.TORCH_SCHEDULER in has else {}
    made |= {"hooks": [Halved()]} if Feature.RATE_HOOK in has else {}
    return KerasTask(**made)
