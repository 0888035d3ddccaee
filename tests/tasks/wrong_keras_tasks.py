"""Keras tasks with one mistake each, as beginners make them."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hpctrain.tasks.definition import KerasTask
from hpctrain.train.hooks import BaseHook


def loss(outputs: Any, batch: Any) -> Any:
    """A correct loss."""
    return keras.ops.mean(keras.losses.sparse_categorical_crossentropy(batch["y"], outputs, from_logits=True))


def swapped(batch: Any, outputs: Any) -> Any:
    """A loss with its arguments in the wrong order."""
    return keras.ops.mean(keras.losses.sparse_categorical_crossentropy(batch["y"], outputs))


def each(outputs: Any, batch: Any) -> Any:
    """A loss without a mean."""
    return keras.losses.sparse_categorical_crossentropy(batch["y"], outputs, from_logits=True)


def broken_metric(outputs: Any, batch: Any) -> Any:
    """A metric that uses a name not in the batch."""
    return keras.ops.mean(keras.ops.argmax(outputs, 1) == batch["label"])


def wide(model: Any, batch: Any) -> Any:
    """A forward function that passes more columns than the model takes."""
    return model(keras.ops.concatenate([batch["x"], batch["x"]], 1))


def made(**changes: Any) -> KerasTask:
    """A task that works, except for the changes."""
    random = np.random.default_rng(3)
    data = {"x": random.normal(size=(40, 4)).astype(np.float32), "y": random.integers(0, 3, 40)}
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.BatchNormalization()])
    return dataclasses.replace(KerasTask(model, loss, keras.optimizers.SGD(0.1), data, data), **changes)


class NoCall(keras.Model):
    """A model without ``call``."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = keras.layers.Dense(3)


class NoReturn(NoCall):
    """A model whose ``call`` returns nothing."""

    def call(self, x: Any) -> None:
        """Discard the layer's outputs."""
        self.layer(x)


class OwnStep(NoCall):
    """A model with its own ``train_step``, to be compiled with an optimizer."""

    def call(self, x: Any) -> Any:
        """The layer's outputs."""
        return self.layer(x)

    def train_step(self, data: Any) -> Any:
        """Take one step."""
        with tf.GradientTape() as tape:
            value = loss(self(data[0]), {"y": data[1]})
        weights = self.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(value, weights), weights, strict=True))
        return {"loss": value}


def compiled(model: Any = None, **settings: Any) -> keras.Model:
    """Compile a model, by default one that fits the data."""
    model = model or keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.compile(**settings)
    return model


def alone(model: Any, **changes: Any) -> KerasTask:
    """A task whose compiled model supplies loss and optimizer."""
    return made(model=model, loss=None, optimizer=None, validation=None, **changes)


def data(**changes: Any) -> dict[str, Any]:
    """Samples that fit, except for the changes."""
    random = np.random.default_rng(3)
    return {"x": random.normal(size=(40, 4)).astype(np.float32), "y": random.integers(0, 3, 40)} | changes


def batched() -> Any:
    """A tf.data.Dataset of batches."""
    return tf.data.Dataset.from_tensor_slices(data()).batch(16, drop_remainder=True)


def of_targets(targets: Any, outputs: Any) -> Any:
    """A loss as Keras calls it."""
    return keras.ops.mean(targets - outputs)


WRONG: dict[str, Any] = {
    "no_call": lambda: made(model=NoCall()),
    "no_return": lambda: made(model=NoReturn()),
    "optimizer_name": lambda: made(optimizer="adam"),
    "no_optimizer": lambda: made(optimizer=None),
    "optimizers": lambda: made(optimizer=[keras.optimizers.Adam(), keras.optimizers.SGD()]),
    "no_loss": lambda: made(loss=None),
    "model_class": lambda: made(model=keras.Sequential),
    "numpy": lambda: made(loss=lambda outputs, batch: np.mean((np.argmax(outputs, 1) - batch["y"]) ** 2)),
    "labels": lambda: made(train=data(y=np.full(40, 3))),
    "validation_names": lambda: made(validation={"x": data()["x"], "label": data()["y"]}),
    "metrics_list": lambda: made(metrics=["accuracy"]),
    "hook_class": lambda: made(hooks=[BaseHook]),
    "input_shape": lambda: made(model=keras.Sequential([keras.Input((5,)), keras.layers.Dense(3)])),
    "batched": lambda: made(train=batched(), validation=None),
    "loss_of_targets": lambda: made(loss=of_targets, train=data(x=np.full((40, 4), 0.1234567, np.float32))),
    "pair": lambda: made(train=(data()["x"], data()["y"])),
    "compiled_without_loss": lambda: alone(compiled()),
    "compiled_with_a_class": lambda: alone(compiled(loss=keras.losses.MeanSquaredError)),
    "compiled_with_four_arrays": lambda: alone(compiled(loss="mse"), train=data(a=np.ones(40), b=np.ones(40))),
    "compiled_metric": lambda: alone(compiled(loss="sparse_categorical_crossentropy", metrics=[keras.metrics.AUC()])),
    "own_step_not_compiled": lambda: alone(OwnStep()),
    "own_step_and_optimizer": lambda: made(model=compiled(OwnStep(), optimizer="sgd")),
    "own_step_and_data": lambda: alone(compiled(OwnStep(), optimizer="sgd"), fit_data=lambda batch: batch),
    "wide": lambda: made(forward=wide),
    "swapped": lambda: made(loss=swapped),
    "each": lambda: made(loss=each),
    "name": lambda: made(loss="crossentropi"),
    "class": lambda: made(loss=keras.losses.SparseCategoricalCrossentropy),
    "sum": lambda: made(loss=keras.losses.SparseCategoricalCrossentropy(reduction="sum")),
    "metric": lambda: made(metrics={"accuracy": broken_metric}),
    "argmax": lambda: made(
        loss=lambda outputs, batch: keras.ops.mean(keras.ops.cast(keras.ops.argmax(outputs, 1), "float32"))
    ),
}
RIGHT: dict[str, Any] = {
    "object": lambda: made(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True)),
    "string": lambda: made(loss="sparse_categorical_crossentropy"),
    "own": made,
}


def task(which: str) -> KerasTask:
    """The task with this name."""
    made: KerasTask = (WRONG | RIGHT)[which]()
    return made
