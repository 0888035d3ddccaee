"""Takes a Keras model's loss, optimizer and metrics into its task: from names, ``compile`` or a ``train_step``."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras

from hpctrain.backends.keras.keras_model import evaluates_itself, optimizers_in, trains_itself
from hpctrain.config.combinations import refusal
from hpctrain.config.features import Feature
from hpctrain.errors import UserError, kind_of
from hpctrain.system.user_errors import no_mean, no_such_loss, not_called, shapes, target_of
from hpctrain.tasks.definition import KerasTask, first_field


@dataclass(eq=False)
class CompiledLoss:
    """A compiled model's loss as a task's loss: loss(outputs, batch)."""

    model: keras.Model
    """A model compiled with a loss."""
    fit_data: Callable[[Mapping[str, Any]], Any]
    """``fit_data`` of the task."""

    def __call__(self, outputs: Any, batch: Mapping[str, Any]) -> Any:
        targets, weights = self.targets(batch)
        refuse_masked(outputs)
        value = self.model._compile_loss(targets, outputs, weights)
        for one in self.model._compile_loss._flat_losses:
            self.refuse_no_mean(one.loss, weights)
        return value

    def scores(self, outputs: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
        """(sum, weight) of compiled metrics, by name; their values change with the next call."""
        compiled = self.model._compile_metrics
        if compiled is None:
            return {}
        targets, weights = self.targets(batch)
        compiled.reset_state()
        compiled.update_state(targets, outputs, weights)
        found = dict(zip(compiled.result(), compiled.metrics, strict=True))
        require_means(found)
        return {name: (metric.total.value, metric.count.value) for name, metric in found.items()}

    def targets(self, batch: Mapping[str, Any]) -> tuple[Any, Any]:
        """y and sample weights, or None for these. Raises UserError if ``fit_data`` gives no y."""
        _, targets, weights = parts_of(self.fit_data, batch)
        return targets, weights

    def refuse_no_mean(self, loss: keras.losses.Loss, weights: Any) -> None:
        """Raises UserError if a loss is not a mean over the samples."""
        if loss.reduction not in MEANS or getattr(loss, "ignore_class", None) is not None:
            raise no_mean(loss.name)
        if weights is not None and loss.reduction == "mean_with_sample_weight":
            raise UserError(
                f"compile's loss {loss.name} divides by the sum of the sample weights, which ranks would do separately",
                "leave its reduction at sum_over_batch_size, or give the task a loss that returns (sum, weight)",
            )


def require_means(metrics: Mapping[str, keras.metrics.Metric]) -> None:
    """Raises UserError if a compiled metric is not a mean over the samples."""
    for name, metric in metrics.items():
        if not isinstance(metric, keras.metrics.Mean) or type(metric).result is not keras.metrics.Mean.result:  # a root
            raise UserError(
                f"compile's metric {name} is of class {type(metric).__name__}, which is not a mean over the samples",
                f"give it to the task instead: metrics={{{name!r}: {type(metric).__name__}()}}",
            )


def parts_of(fit_data: Callable[[Mapping[str, Any]], Any], batch: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """x, y and sample weights (or None). Raises UserError if ``fit_data`` returns something else."""
    data = fit_data(dict(batch))
    if not isinstance(data, tuple) or not 2 <= len(data) <= 3:
        raise UserError(
            f"compile's loss needs x, y and perhaps sample weights, and samples hold {', '.join(batch)}",
            "say which is which: fit_data=lambda batch: (batch['x'], batch['y'])",
        )
    x, targets, weights = keras.utils.unpack_x_y_sample_weight(data)
    return x, targets, weights


def of_fit(fit_data: Callable[[Mapping[str, Any]], Any], model: keras.Model, batch: Mapping[str, Any]) -> Any:
    """Applies the model to x as ``fit`` would."""
    return model(keras.utils.unpack_x_y_sample_weight(fit_data(dict(batch)))[0])


def of_compiled(fit_data: Callable[[Mapping[str, Any]], Any], model: keras.Model, batch: Mapping[str, Any]) -> Any:
    """Applies the model to x, requiring targets for the loss of ``compile``."""
    return model(parts_of(fit_data, batch)[0])


def inputs_of(task: KerasTask, batch: Mapping[str, Any]) -> str:
    """What the model gets, in words."""
    if isinstance(task.forward, functools.partial) and task.forward.func is of_compiled:
        fix = "several inputs: fit_data=lambda batch: ((batch['a'], batch['b']), batch['y'])"
        return f"the model gets x of fit_data, by default the first of a dict of {shapes(batch)}; for {fix}"
    return f"forward(model, batch) gets the model and a dict of {shapes(batch)}; by default the first array"


def adopted(task: KerasTask, fields: Sequence[str]) -> KerasTask:
    """Fills fields that a task leaves out from its model, and makes its loss a function.

    Args:
        task: the user's task.
        fields: names of a sample's arrays.

    Raises:
        UserError: something is missing or given twice.
    """
    model = task.model
    if trains_itself(model):
        return with_own_optimizers(task, fields)
    if callable(model) and not isinstance(model, (type, types.FunctionType, keras.Layer)):
        raise UserError(f"model of the KerasTask is {kind_of(model)}", "give a keras.Model, or return a TorchTask")
    compiled = isinstance(model, keras.Model) and model.compiled
    if compiled and task.optimizer is None:
        scaled = isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
        # compile wraps it for fp16, but the run scales the loss itself
        optimizer = model.optimizer.inner_optimizer if scaled else model.optimizer
        task = dataclasses.replace(task, optimizer=optimizer)
    if task.loss is not None or not compiled:
        return dataclasses.replace(task, loss=as_loss(task.loss, fields))
    if model._compile_loss is None:
        raise UserError("neither the task nor compile has a loss", "give one: model.compile(optimizer, loss='mse')")
    for one in keras.tree.flatten(model.loss):
        if isinstance(one, type):
            raise not_called(one.__name__)
    if model._compile_metrics is not None:
        given = keras.tree.flatten(
            [model._compile_metrics._user_metrics, model._compile_metrics._user_weighted_metrics]
        )
        require_means({one.name: one for one in given if isinstance(one, keras.metrics.Metric)})
    forward = functools.partial(of_compiled, task.fit_data) if task.forward is first_field else task.forward
    return dataclasses.replace(task, loss=CompiledLoss(model, task.fit_data), forward=forward)


def reported(task: KerasTask) -> list[str]:
    """Names that evaluations report; empty if unknown: a custom ``test_step``, or compiled metrics not yet built."""
    compiled = task.model._compile_metrics if isinstance(task.loss, CompiledLoss) else None
    if evaluates_itself(task.model) or (compiled is not None and not compiled.built):
        return []
    return ["loss", *task.metrics, *(compiled.result() if compiled is not None else ())]


def with_own_optimizers(task: KerasTask, fields: Sequence[str]) -> KerasTask:
    """Sets the optimizers of a task with a custom ``train_step``: all of the model's, by path ('' is ``optimizer``)."""
    model = task.model
    found = optimizers_in(attributes(model))
    if not found:
        raise UserError(
            f"{type(model).__name__} has a custom train_step, but no optimizer",
            "compile the model before the task returns it: model.compile(optimizer=keras.optimizers.Adam(1e-3))",
        )
    if task.optimizer is not None and all(task.optimizer is not one for one in found.values()):
        raise refusal({Feature.TRAIN_STEP: type(model).__name__, Feature.OTHER_OPTIMIZER: True})
    optimizers = {"" if path == "optimizer" else path: one for path, one in found.items()}
    loss = None if task.loss is None else as_loss(task.loss, fields)
    forward = functools.partial(of_fit, task.fit_data) if task.forward is first_field else task.forward
    return dataclasses.replace(task, optimizer=optimizers, loss=loss, forward=forward)


def attributes(model: keras.Model) -> dict[str, Any]:
    """Attributes of a model, public ones first: objects reachable in several places are named by the first."""
    return dict(sorted(vars(model).items(), key=lambda item: item[0].startswith("_")))


def holders(task: KerasTask) -> dict[str, Any]:
    """Objects that process a rank's own samples and may have state, by name."""
    held = {"loss": task.model.loss if isinstance(task.loss, CompiledLoss) else task.loss, "forward": task.forward}
    if isinstance(task.model, keras.Model) and trains_itself(task.model):
        held |= {"model": attributes(task.model), "train_step": type(task.model).train_step}
        held["metrics"] = list(task.model.metrics)
    return held


MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")
"""Reductions that return the mean over the samples."""
SOME = ("mse", "mae", "huber", "binary_crossentropy", "categorical_crossentropy", "sparse_categorical_crossentropy")


def of_target(function: Callable[..., Any], target: str, outputs: Any, batch: Mapping[str, Any]) -> Any:
    """Applies a Keras loss(target, output) to a batch; functions of Keras return one value per sample."""
    refuse_masked(outputs)
    mean = keras.ops.mean(function(batch[target], outputs))
    ignored = getattr(function, "ignore_class", None)
    if ignored is None:
        return mean
    weight = keras.ops.sum(keras.ops.cast(batch[target] != ignored, mean.dtype))
    return mean * weight, weight


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
    loss, name = given, getattr(given, "__name__", type(given).__name__)
    if isinstance(given, str):
        try:
            loss, name = keras.losses.get(given), repr(given)
        except ValueError:
            raise no_such_loss(given, SOME) from None
    elif isinstance(given, type) and issubclass(given, keras.losses.Loss):
        raise not_called(name)
    elif isinstance(given, keras.losses.Loss):
        if given.reduction not in MEANS:
            raise no_mean(name)
    elif not isinstance(given, types.FunctionType) or not given.__module__.startswith("keras."):
        return given
    return functools.partial(of_target, loss, target_of(fields, name))


NAMES = {"lr": "learning_rate", "eps": "epsilon"}
"""Keras' names of options that differ."""


def make_optimizer(name: str, options: Mapping[str, Any], model: Any) -> Any:
    """Makes an optimizer by name; it is built later, when the model's variables are known."""
    given = {NAMES.get(key, key): value for key, value in options.items() if key != "betas"}
    given |= dict(zip(("beta_1", "beta_2"), options.get("betas", ()), strict=False))
    return keras.optimizers.get({"class_name": name, "config": given})
