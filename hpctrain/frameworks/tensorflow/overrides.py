"""What a Keras model's class overrides of training and evaluation, and what its own steps return."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from hpctrain.errors import UserError
from hpctrain.tasks.definition import KerasTask


def trains_itself(model: Any) -> bool:
    """Whether a model's class overrides a step of Keras, or what it consists of: then it is trained by its steps."""
    kind = type(model)
    return isinstance(model, keras.Model) and (
        kind.train_step is not keras.Model.train_step
        or kind.test_step is not keras.Model.test_step
        or kind.compute_loss is not keras.Model.compute_loss
        or kind.compute_metrics is not keras.Model.compute_metrics
    )


def evaluates_itself(model: keras.Model) -> bool:
    """Whether an evaluation is the model's ``test_step``: its own one, or Keras' if it has a loss for that."""
    kind = type(model)
    if kind.test_step is not keras.Model.test_step:
        return True
    return trains_itself(model) and (
        model._compile_loss is not None or kind.compute_loss is not keras.Model.compute_loss
    )


def predicts_itself(model: keras.Model) -> bool:
    """Whether predictions are the model's own ``predict_step``."""
    return type(model).predict_step is not keras.Model.predict_step


def scalars(logs: Any, name: str) -> dict[str, tf.Tensor]:
    """What a step returned, by name.

    Raises:
        UserError: it is not a dict of scalars.
    """
    if not isinstance(logs, Mapping):
        raise UserError(
            f"{name} of the model returned {'None' if logs is None else f'a {type(logs).__name__}'}",
            "return a dict of scalars: {'loss': loss}, or {m.name: m.result() for m in self.metrics}",
        )
    found: dict[str, tf.Tensor] = {}
    for key, value in logs.items():
        if isinstance(value, Mapping):  # of compiled metrics
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
    """(sum, weight) of what the model's ``test_step`` says of a batch; in a TensorFlow function."""
    task.model.reset_metrics()
    samples = tf.cast(tf.shape(next(iter(batch.values())))[0], tf.float32)
    logs = scalars(task.model.test_step(task.fit_data(dict(batch))), "test_step")
    return {name: (value * samples, samples) for name, value in logs.items()}
