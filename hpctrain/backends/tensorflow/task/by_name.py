"""Keras losses (names, objects and functions) as a task's loss, and optimizers by name."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from hpctrain.errors import UserError
from hpctrain.tasks.user_errors import no_mean, no_such_loss, not_called, target_of

MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")
"""Reductions that return the mean over the samples."""
SOME = ("mse", "mae", "huber", "binary_crossentropy", "categorical_crossentropy", "sparse_categorical_crossentropy")


def of_target(function: Callable[..., Any], target: str, outputs: Any, batch: Mapping[str, Any]) -> Any:
    """Applies a Keras loss(target, output) to a batch; functions of Keras return one value per sample."""
    refuse_masked(outputs)
    return keras.ops.mean(function(batch[target], outputs))


def refuse_masked(outputs: Any) -> None:
    """Raises UserError if outputs carry a mask: Keras would skip masked steps, so batches would weigh differently."""
    if any(keras.src.backend.get_keras_mask(one) is not None for one in keras.tree.flatten(outputs)):
        raise UserError(
            "the outputs carry a mask, by which Keras' losses divide differently on each rank",
            "return (sum, weight) from a function(outputs, batch), or leave mask_zero out",
        )


def as_loss(given: Any, fields: Sequence[str]) -> Any:
    """Converts a task's ``loss`` to a function loss(outputs, batch).

    Args:
        given: a name, a Keras loss, or the user's function, which is returned unchanged.
        fields: names of a sample's arrays.

    Raises:
        UserError: the name is unknown, or the loss is not a mean over the samples.
    """
    if isinstance(given, str):
        try:
            return functools.partial(of_target, keras.losses.get(given), target_of(fields, repr(given)))
        except ValueError:
            raise no_such_loss(given, SOME) from None
    if isinstance(given, type) and issubclass(given, keras.losses.Loss):
        raise not_called(given.__name__)
    if isinstance(given, keras.losses.Loss):
        if given.reduction not in MEANS:
            raise no_mean(type(given).__name__)
        return functools.partial(of_target, given, target_of(fields, type(given).__name__))
    if isinstance(given, types.FunctionType) and given.__module__.startswith("keras."):
        return functools.partial(of_target, given, target_of(fields, given.__name__))
    return given


NAMES = {"lr": "learning_rate", "eps": "epsilon"}
"""Keras' names of options that differ."""


def make_optimizer(name: str, options: Mapping[str, Any], model: Any) -> Any:
    """Makes an optimizer by name; it is built later, when the model's variables are known."""
    given = {NAMES.get(key, key): value for key, value in options.items() if key != "betas"}
    given |= dict(zip(("beta_1", "beta_2"), options.get("betas", ()), strict=False))
    return keras.optimizers.get({"class_name": name, "config": given})
