"""A Keras task that trains LoRA adapters of its layers."""

from __future__ import annotations

import keras
import numpy as np
from keras import layers

from hpctrain.tasks.definition import KerasTask

ALPHA = 3.0
INPUTS = np.arange(48).reshape(8, 6) % 5


def network(adapted: bool = False) -> keras.Model:
    """A model with one layer of each kind that has ``enable_lora``."""
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Embedding(5, 4, name="words"),
            layers.Conv1D(3, 2, name="conv"),
            layers.EinsumDense("abc,cde->abde", (None, 2, 3), name="einsum"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(2, name="head"),
        ]
    )
    for name, rank in {"words": 2, "conv": 1, "einsum": 2, "head": 3}.items() if adapted else ():
        model.get_layer(name).enable_lora(rank, lora_alpha=ALPHA, b_initializer="he_uniform")
    return model


def task() -> KerasTask:
    """The task, with adapters."""
    data = {"x": INPUTS, "y": np.ones((8, 2), np.float32)}
    return KerasTask(network(adapted=True), "mse", keras.optimizers.Adam(0.1), data)
