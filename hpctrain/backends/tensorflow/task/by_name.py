"""Losses of Keras by name, and its own loss objects and functions, as a task's loss."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from hpctrain.errors import UserError
from hpctrain.tasks.user_errors import no_mean, no_such_loss, not_called, target_of

MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")
"""Reductions that give the mean over the samples."""
SOME = ("mse", "mae", "huber", "binary_crossentropy", "categorical_crossentropy", "sparse_categorical_crossentropy")


def of_target(function: Callable[..., Any], target: str, outputs: Any, batch: Mapping[str, Any]) -> Any:
    """A loss that knows nothing of batches; functions of Keras give one value a sample."""
    refuse_masked(outputs)
    return keras.ops.mean(function(batch[target], outputs))


def refuse_masked(outputs: Any) -> None:
    """Raises UserError if Keras would leave out masked steps: batches then weigh differently."""
    if any(keras.src.backend.get_keras_mask(one) is not None for one in keras.tree.flatten(outputs)):
        raise UserError(
            "the outputs carry a mask, by which Keras' losses divide differently on each rank",
            "return (sum, weight) from a function(outputs, batch), or leave mask_zero out",
        )


def as_loss(given: Any, fields: Sequence[str]) -> Any:
    """What a task's ``loss`` stands for: loss(outputs, batch).

    Args:
        given: a name, one of Keras' losses, or a function of the user's, which is returned as it is.
        fields: names of a sample's arrays.

    Raises:
        UserError: no such name, or a loss that is not a mean over the samples.
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
"""Options that Keras calls otherwise."""


def make_optimizer(name: str, options: Mapping[str, Any], model: Any) -> Any:
    """One that is built with the model's variables when these are known."""
    given = {NAMES.get(key, key): value for key, value in options.items() if key != "betas"}
    given |= dict(zip(("beta_1", "beta_2"), options.get("betas", ()), strict=False))
    return keras.optimizers.get({"class_name": name, "config": given})
