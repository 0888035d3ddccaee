"""Keras models for ``hpctrain bench step``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hpctrain.backends.tensorflow.keras_framework import KerasFramework
from hpctrain.backends.tensorflow.task.keras_opening import open_keras
from hpctrain.comm.world import World
from hpctrain.reduce.reducer_choice import ReducerChoice
from hpctrain.tasks.definition import KerasTask
from hpctrain.train.clock import IntervalClock
from hpctrain.train.framework import HostBatch, StepSettings


def mlp() -> keras.Model:
    """MLP 784-2048-2048-10; 5.8 M parameters."""
    wide = [keras.layers.Dense(2048, activation="relu") for _ in range(2)]
    return keras.Sequential([keras.Input((784,)), *wide, keras.layers.Dense(10)])


def conv() -> keras.Model:
    """CNN with four blocks of convolution, BatchNorm and ReLU; 0.4 M parameters."""
    model = keras.Sequential([keras.Input((32, 32, 3))])
    for stride, width in ((1, 32), (2, 64), (2, 128), (2, 256)):
        model.add(keras.layers.Conv2D(width, 3, strides=stride, padding="same", use_bias=False))
        model.add(keras.layers.BatchNormalization())
        model.add(keras.layers.ReLU())
    model.add(keras.layers.GlobalAveragePooling2D())
    model.add(keras.layers.Dense(10))
    return model


def gpt() -> keras.Model:
    """Transformer with six blocks of width 256 and four heads over 64 positions; 4.9 M parameters."""
    inputs = keras.Input((64, 64))
    hidden = keras.layers.Dense(256)(inputs)
    for _ in range(6):
        normal = keras.layers.LayerNormalization()(hidden)
        hidden += keras.layers.MultiHeadAttention(4, 64)(normal, normal, use_causal_mask=True)
        wide = keras.layers.Dense(1024, activation="gelu")(keras.layers.LayerNormalization()(hidden))
        hidden += keras.layers.Dense(256)(wide)
    return keras.Model(inputs, keras.layers.Dense(10)(keras.layers.GlobalAveragePooling1D()(hidden)))


MODELS: dict[str, tuple[Callable[[], keras.Model], tuple[int, ...]]] = {
    "gpt": (gpt, (4, 64, 64)),
    "mlp": (mlp, (64, 784)),
    "conv": (conv, (16, 32, 32, 3)),
}
"""Each model, and the shape of one rank's batch."""


def cross_entropy(outputs: tf.Tensor, batch: Any) -> tf.Tensor:
    """Cross-entropy, mean over the samples."""
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(batch["label"], outputs))


@dataclass(frozen=True)
class KerasBenchProblem:
    """A model and this rank's samples."""

    model: keras.Model
    optimizer: keras.optimizers.Optimizer
    batch: HostBatch

    def open(self, world: World, config: StepSettings, choice: ReducerChoice) -> KerasFramework:
        task = KerasTask(self.model, cross_entropy, self.optimizer, None)
        return open_keras(task, world, config, IntervalClock(), choice)


def problem(name: str, world: World) -> KerasBenchProblem:
    """Makes one of MODELS with SGD; the weights are equal on all ranks."""
    make, shape = MODELS[name]
    return KerasBenchProblem(seeded(make), keras.optimizers.SGD(1e-3, momentum=0.9), batch_of(shape, world))


def seeded(make: Callable[[], keras.Model]) -> keras.Model:
    keras.utils.set_random_seed(0)
    return make()


def batch_of(shape: tuple[int, ...], world: World) -> HostBatch:
    """Makes this rank's samples, with ten classes."""
    random = np.random.default_rng(1 + world.rank)
    inputs = random.normal(size=shape).astype(np.float32)
    return {"input": inputs, "label": random.integers(0, 10, shape[0])}
