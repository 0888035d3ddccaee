"""A Keras task with dropout, batch normalisation and augmentation."""

from __future__ import annotations

from collections.abc import Mapping

import keras
import tensorflow as tf
from keras import layers

from hpctrain.tasks.definition import KerasTask
from tests.support.checkpoint_data import augment, data


def loss(logits: tf.Tensor, batch: Mapping[str, tf.Tensor]) -> tf.Tensor:
    """Cross-entropy."""
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(batch["y"], tf.cast(logits, tf.float32)))


def task(optimizer: str = "adam") -> KerasTask:
    """The task."""
    model = keras.Sequential(
        [
            keras.Input((12,)),
            layers.Dense(32),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Dropout(0.3),
            layers.Dense(3),
        ]
    )
    made = keras.optimizers.AdamW(0.01) if optimizer == "adam" else keras.optimizers.SGD(0.01, momentum=0.9)
    return KerasTask(model, loss, made, data(), data(40), transform=augment)


def plain() -> KerasTask:
    """Without per-rank noise or statistics."""
    model = keras.Sequential([keras.Input((12,)), layers.Dense(32, activation="tanh"), layers.Dense(3)])
    return KerasTask(model, loss, keras.optimizers.Adam(0.01), data(), transform=augment)
