"""A float64 Keras model and many optimizers, to be trained with and without sharded state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf
from keras import layers, ops, optimizers

from hpctrain.tasks.definition import KerasTask
from tests.support.checkpoint_data import augment, data


class Sign(optimizers.Optimizer):
    """A custom optimizer that follows the sign of a momentum."""

    def build(self, variables: list[Any]) -> None:
        """Make one slot per variable."""
        super().build(variables)
        self.momenta = self.add_optimizer_variables(variables, "momentum")

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Update each element independently."""
        momentum = self.momenta[self._get_variable_index(variable)]
        self.assign(momentum, 0.9 * momentum + 0.1 * gradient)
        self.assign_sub(variable, ops.cast(learning_rate, variable.dtype) * ops.sign(momentum))


class Scaled(optimizers.Optimizer):
    """A custom optimizer whose step length depends on the whole tensor's norm."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Update each tensor as a whole."""
        rate = ops.cast(learning_rate, variable.dtype) * ops.norm(variable) / (ops.norm(gradient) + 1e-9)
        self.assign_sub(variable, rate * gradient)


class Coupled(optimizers.Optimizer):
    """A custom optimizer whose step depends on the gradients of all variables so far."""

    def build(self, variables: list[Any]) -> None:
        """Make one number of state."""
        super().build(variables)
        self.seen = self.add_variable((), name="seen")

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Update a variable; the order of variables matters."""
        self.seen.assign_add(ops.cast(ops.sum(gradient**2), "float32"))
        rate = ops.cast(learning_rate / (1 + self.seen), variable.dtype)
        self.assign_sub(variable, rate * gradient)


def excluding() -> optimizers.Optimizer:
    """AdamW with weight decay for kernels only."""
    made = optimizers.AdamW(0.01, weight_decay=0.1, epsilon=1e-4)
    made.exclude_from_weight_decay(var_names=["bias"])
    return made


BY_ROWS: Mapping[str, Callable[[], optimizers.Optimizer]] = {
    "SGD": lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "Adam": lambda: optimizers.Adam(0.01, amsgrad=True),
    "AdamW": excluding,
    "RMSprop": lambda: optimizers.RMSprop(0.01, momentum=0.5, centered=True),
    "Adagrad": lambda: optimizers.Adagrad(0.1),
    "Adadelta": lambda: optimizers.Adadelta(1.0),
    "Adamax": lambda: optimizers.Adamax(0.01),
    "Nadam": lambda: optimizers.Nadam(0.01),
    "Ftrl": lambda: optimizers.Ftrl(0.1),
    "Lion": lambda: optimizers.Lion(0.01),
    "Sign of a user": lambda: Sign(0.01),
    "with averages": lambda: optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3),
    "accumulating": lambda: optimizers.Adam(0.01, gradient_accumulation_steps=2, clipvalue=0.02),
    "scheduled": lambda: optimizers.Adam(optimizers.schedules.PolynomialDecay(0.0, 4, 0.1)),
}
"""Optimizers that update each element independently."""
WHOLE: Mapping[str, Callable[[], optimizers.Optimizer]] = {
    "Lamb": lambda: optimizers.Lamb(0.01),
    "Adafactor": lambda: optimizers.Adafactor(0.01),
    "Scaled of a user": lambda: Scaled(0.01),
    "clipping each": lambda: optimizers.SGD(0.1, clipnorm=0.01),
}
"""Optimizers that need whole variables."""


def model() -> keras.Model:
    """Layers whose sizes do not divide evenly, one with a kernel constraint, one frozen."""
    made = keras.Sequential(
        [
            keras.Input((12,), dtype="float64"),
            layers.Dense(31, activation="tanh", dtype="float64"),
            layers.Dense(7, activation="tanh", dtype="float64", kernel_constraint=keras.constraints.MaxNorm(0.8)),
            layers.Dense(5, trainable=False, dtype="float64"),
            layers.Dense(3, dtype="float64"),
        ]
    )
    return made


def loss(outputs: tf.Tensor, batch: Mapping[str, tf.Tensor]) -> tf.Tensor:
    """Mean cross-entropy."""
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(batch["y"], outputs))


def task() -> KerasTask:
    """A task for ``fit``, in which nothing depends on the rank."""
    return KerasTask(model(), loss, excluding(), data(), transform=augment)
