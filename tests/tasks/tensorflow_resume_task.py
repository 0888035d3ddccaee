"""Keras tasks to resume: dropout, batch normalisation, augmentation, and state in various places."""

from __future__ import annotations

from collections.abc import Mapping

import keras
import tensorflow as tf
from keras import layers

from hpctrain.tasks.definition import KerasTask
from hpctrain.train.stateful import PerRank
from tests.support.checkpoint_data import augment, data


def loss(logits: tf.Tensor, batch: Mapping[str, tf.Tensor]) -> tf.Tensor:
    """Cross-entropy."""
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(batch["y"], tf.cast(logits, tf.float32)))


def task(optimizer: str = "adam") -> KerasTask:
    """A task with dropout, batch normalisation and augmentation."""
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
    """A task without per-rank noise or statistics."""
    model = keras.Sequential([keras.Input((12,)), layers.Dense(32, activation="tanh"), layers.Dense(3)])
    return KerasTask(model, loss, keras.optimizers.Adam(0.01), data(), transform=augment)


class Centred:
    """A loss that keeps a running mean of the logits."""

    def __init__(self) -> None:
        self.center = tf.Variable(tf.zeros(3))

    def __call__(self, logits: tf.Tensor, batch: Mapping[str, tf.Tensor]) -> tf.Tensor:
        """Cross-entropy of the centred logits."""
        self.center.assign(0.9 * self.center + 0.1 * tf.reduce_mean(logits, 0))
        return loss(logits - self.center, batch)


class Both(keras.optimizers.Optimizer):
    """An optimizer made of others that have slots of the same names."""

    def __init__(self, *inner: keras.optimizers.Optimizer) -> None:
        super().__init__(learning_rate=0.01)
        self.inner = inner

    def build(self, variables: list[keras.Variable]) -> None:
        """See Optimizer."""
        super().build(variables)
        for number, one in enumerate(self.inner):
            one.build(variables[number :: len(self.inner)])

    def apply(self, grads: list[tf.Tensor], trainable_variables: list[keras.Variable] | None = None) -> None:
        """See Optimizer."""
        for number, one in enumerate(self.inner):
            one.apply(grads[number :: len(self.inner)], (trainable_variables or [])[number :: len(self.inner)])


def holding() -> KerasTask:
    """A task with state in the optimizer's parts and in the loss."""
    made = plain()
    both = Both(keras.optimizers.SGD(0.01, momentum=0.9), keras.optimizers.SGD(0.02, momentum=0.5))
    return KerasTask(made.model, Centred(), both, data(), data(40), transform=augment)


class Lanes:
    """A loss that remembers the last logits of each rank's samples."""

    def __init__(self) -> None:
        self.last = tf.Variable(tf.zeros(3))

    def __call__(self, logits: tf.Tensor, batch: Mapping[str, tf.Tensor]) -> tf.Tensor:
        """Cross-entropy, shifted by the remembered logits."""
        shift = 0.1 * self.last
        self.last.assign(tf.reduce_mean(logits, 0))
        return loss(logits - shift, batch)

    def state_dict(self) -> dict[str, tf.Variable]:
        """See PerRank."""
        return {"last": self.last}

    def load_state_dict(self, saved: dict[str, tf.Tensor]) -> None:
        """See PerRank."""
        self.last.assign(saved["last"])


def declared() -> KerasTask:
    """A task that declares state of each rank."""
    made, lanes = plain(), Lanes()
    state = {"lanes": PerRank(lanes)}
    return KerasTask(made.model, lanes, made.optimizer, data(), transform=augment, state=state)


def drawing() -> KerasTask:
    """A task whose loss is a random number, whatever the model does."""
    made, noise = plain(), tf.random.get_global_generator()
    return KerasTask(
        made.model, lambda logits, batch: 0 * tf.reduce_sum(logits) + noise.uniform(()), made.optimizer, data()
    )
