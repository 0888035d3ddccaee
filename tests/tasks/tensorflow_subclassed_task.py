"""A small transformer as a subclassed model that is built at its first call."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers, ops

from hpctrain.tasks.definition import KerasTask
from tests.support.checkpoint_data import data


class Transformer(keras.Model):
    """float32[samples, 3, 4] -> logits of three classes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = layers.Dense(8)
        self.attention = layers.MultiHeadAttention(2, 4)
        self.normalization = layers.LayerNormalization()
        self.wide, self.narrow = layers.Dense(16, activation="relu"), layers.Dense(8)
        self.head = layers.Dense(3)

    def call(self, inputs: Any) -> Any:
        """Logits."""
        hidden = self.embedding(inputs)
        hidden = self.normalization(hidden + self.attention(hidden, hidden))
        return self.head(ops.mean(hidden + self.narrow(self.wide(hidden)), 1))


def loss(logits: Any, batch: Any) -> Any:
    """Mean cross-entropy."""
    return ops.mean(keras.losses.sparse_categorical_crossentropy(batch["y"], logits, from_logits=True))


def as_sequence(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Reshape a sample; only transformed samples have the shape that the model takes."""
    return sample | {"x": sample["x"].reshape(3, 4)}


def task() -> KerasTask:
    """A task with the model not yet built."""
    return KerasTask(Transformer(), loss, keras.optimizers.Adam(0.01), data(), transform=as_sequence)
