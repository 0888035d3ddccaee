"""A small Keras network with dropout."""

from __future__ import annotations

from collections.abc import Mapping

import keras
import tensorflow as tf

from hpctrain import KerasTask
from tests.chaos.notes import FEATURES, PAUSE_S, Journal, data


def task(folder: str, pause_s: float = PAUSE_S) -> KerasTask:
    """Return the task; ranks write their journals to ``folder``."""
    journal = Journal(folder, pause_s)
    layers = [keras.layers.Dense(32, activation="relu"), keras.layers.Dropout(0.2), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((FEATURES,)), *layers])

    def loss(logits: tf.Tensor, batch: Mapping[str, tf.Tensor]) -> tf.Tensor:
        tf.numpy_function(journal.saw, [batch["id"]], [])
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(batch["y"], logits))

    return KerasTask(model, loss, keras.optimizers.AdamW(3e-3), train=data(), hooks=[journal])
