"""Tasks as beginners write them, each with one mistake, in Keras."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import numpy as np

from hpctrain.tasks.definition import KerasTask


def loss(outputs: Any, batch: Any) -> Any:
    """As it should be."""
    return keras.ops.mean(keras.losses.sparse_categorical_crossentropy(batch["y"], outputs, from_logits=True))


def swapped(batch: Any, outputs: Any) -> Any:
    """Arguments in the other order."""
    return keras.ops.mean(keras.losses.sparse_categorical_crossentropy(batch["y"], outputs))


def each(outputs: Any, batch: Any) -> Any:
    """No mean."""
    return keras.losses.sparse_categorical_crossentropy(batch["y"], outputs, from_logits=True)


def broken_metric(outputs: Any, batch: Any) -> Any:
    """A name that is not in the batch."""
    return keras.ops.mean(keras.ops.argmax(outputs, 1) == batch["label"])


def wide(model: Any, batch: Any) -> Any:
    """More columns than the model takes."""
    return model(keras.ops.concatenate([batch["x"], batch["x"]], 1))


def made(**changes: Any) -> KerasTask:
    """A task that works, but for the changes."""
    random = np.random.default_rng(3)
    data = {"x": random.normal(size=(40, 4)).astype(np.float32), "y": random.integers(0, 3, 40)}
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.BatchNormalization()])
    return dataclasses.replace(KerasTask(model, loss, keras.optimizers.SGD(0.1), data, data), **changes)


WRONG: dict[str, Any] = {
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
    """One of them."""
    made: KerasTask = (WRONG | RIGHT)[which]()
    return made
