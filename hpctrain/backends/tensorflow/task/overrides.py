"""Detects a Keras model's custom training and evaluation steps, reads their results and intercepts their updates."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from hpctrain.errors import UserError, kind_of
from hpctrain.tasks.definition import KerasTask


def scalars(logs: Any, name: str) -> dict[str, tf.Tensor]:
    """Reads a step's result as scalars by name.

    Raises:
        UserError: it is not a dict of scalars.
    """
    if not isinstance(logs, Mapping):
        raise UserError(
            f"{name} of the model returned {'None' if logs is None else kind_of(logs)}",
            "return a dict of scalars: {'loss': loss}, or {m.name: m.result() for m in self.metrics}",
        )
    found: dict[str, tf.Tensor] = {}
    for key, value in logs.items():
        if isinstance(value, Mapping):  # compiled metrics
            found |= scalars(value, name)
            continue
        scalar = tf.cast(tf.convert_to_tensor(value), tf.float32)
        if scalar.shape.rank != 0:
            raise UserError(
                f"{name} of the model returned {key!r} of shape {list(scalar.shape)}", "return scalars: take the mean"
            )
        found[str(key)] = scalar
    if not found:
        raise UserError(f"{name} of the model returned an empty dict", "return a dict of scalars: {'loss': loss}")
    return found


def tested(task: KerasTask, batch: Mapping[str, tf.Tensor]) -> dict[str, tuple[tf.Tensor, tf.Tensor]]:
    """(sum, weight) of the results of the model's ``test_step``, by name; call it in a TensorFlow function."""
    task.model.reset_metrics()
    samples = tf.cast(tf.shape(next(iter(batch.values())))[0], tf.float32)
    logs = scalars(task.model.test_step(task.fit_data(dict(batch))), "test_step")
    return {name: (value * samples, samples) for name, value in logs.items()}


Apply = Callable[[Any, Any], None]
"""apply(gradients, variables) of one optimizer."""


@contextlib.contextmanager
def intercepted(handle: Callable[[keras.optimizers.Optimizer, Apply, Any, Any], None]) -> Iterator[None]:
    """In the body, ``optimizer.apply(gradients, variables)`` calls ``handle(optimizer, apply, gradients, variables)``.

    Patches the optimizer classes and restores them at the end, so that no optimizer is missed, wherever it is kept.
    Nested calls, of other optimizers or a base class within ``apply``, are not intercepted.
    """
    inside = False

    def replacement(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def apply(self: keras.optimizers.Optimizer, grads: Any, trainable_variables: Any = None) -> None:
            nonlocal inside
            if inside:
                original(self, grads, trainable_variables)
                return
            inside = True
            try:
                handle(self, functools.partial(original, self), grads, trainable_variables)
            finally:
                inside = False

        return apply

    originals = {cls: vars(cls)["apply"] for cls in family(keras.optimizers.Optimizer) if "apply" in vars(cls)}
    for cls, original in originals.items():
        cls.apply = replacement(original)
    try:
        yield
    finally:
        for cls, original in originals.items():
            cls.apply = original


def family(cls: type) -> set[Any]:
    """A class with its bases and all its subclasses."""
    found: set[Any] = set(cls.__mro__)
    waiting: list[Any] = [cls]
    while waiting:
        more = waiting.pop().__subclasses__()
        waiting += more
        found.update(more)
    return found
