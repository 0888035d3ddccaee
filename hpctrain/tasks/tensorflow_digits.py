"""Handwritten digits with Keras 3: a network that reaches 98% accuracy in seconds. A template for your own tasks.

The network is the same as in ``torch_digits``. Its weights correspond as follows (Keras on the left):

- ``conv1/kernel``, ``conv2/kernel``: ``conv1.weight``, ``conv2.weight`` with axes (2, 3, 1, 0)
- ``dense1/kernel``, ``dense2/kernel``: ``dense1.weight``, ``dense2.weight`` transposed
- ``.../bias``: ``....bias``
"""

from __future__ import annotations

from collections.abc import Mapping

import keras
import tensorflow as tf
from keras import layers

from hpctrain.tasks.definition import KerasTask
from hpctrain.tasks.digits_data import pack


def network() -> keras.Model:
    """Two convolutions and two dense layers; float32[n, 1, 8, 8] -> float32[n, 10] logits."""
    return keras.Sequential(
        [
            keras.Input((1, 8, 8)),
            layers.Permute((2, 3, 1)),
            layers.Conv2D(16, 3, padding="same", activation="relu", name="conv1"),
            layers.MaxPool2D(2),
            layers.Conv2D(32, 3, padding="same", activation="relu", name="conv2"),
            layers.MaxPool2D(2),
            layers.Permute((3, 1, 2)),
            layers.Flatten(),
            layers.Dense(64, activation="relu", name="dense1"),
            layers.Dense(10, name="dense2"),
        ]
    )


def loss(logits: tf.Tensor, batch: Mapping[str, tf.Tensor]) -> tf.Tensor:
    """Mean cross-entropy."""
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(batch["label"], logits))


def accuracy(logits: tf.Tensor, batch: Mapping[str, tf.Tensor]) -> tf.Tensor:
    """Fraction of digits recognized."""
    return tf.reduce_mean(tf.cast(tf.argmax(logits, 1) == batch["label"], tf.float32))


def task(data: str = "data/digits", lr: float = 2e-3) -> KerasTask:
    """The task; ``data`` is the folder of its HDF5 files, which are created on first use."""
    train, validation = pack(data)
    return KerasTask(
        model=network(),
        loss=loss,
        optimizer=keras.optimizers.Adam(lr),
        train=train,
        validation=validation,
        metrics={"accuracy": accuracy},
    )
