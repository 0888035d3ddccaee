"""A compiled Keras model whose training metrics NumPy can compute."""

from __future__ import annotations

from typing import Any

import keras

from hpctrain.tasks.definition import KerasTask
from tests.tasks.metered_data import CLASSES, FIRST, HIDDEN, INPUTS, SECOND, Median, X, Y


def task(lr: float = 0.0) -> KerasTask:
    """The task."""
    model = keras.Sequential(
        [
            keras.Input((INPUTS,)),
            keras.layers.Dense(HIDDEN, "tanh", use_bias=False),
            keras.layers.Dense(CLASSES, use_bias=False),
        ]
    )
    model.set_weights([FIRST, SECOND])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(lr), loss, metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2)])

    def weighted(outputs: Any, batch: Any) -> tuple[Any, Any]:
        weights = keras.ops.cast(batch["y"], "float32")
        return keras.ops.sum(outputs[:, 0] * weights), keras.ops.sum(weights)

    return KerasTask(
        model,
        train={"x": X, "y": Y},
        validation={"x": X, "y": Y},
        metrics={"largest": weighted, "median": Median(), "hits": keras.metrics.SparseCategoricalAccuracy()},
    )
