"""Runs a task's forward pass, loss and metrics eagerly on one batch; errors name the field and the user's line."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from hpctrain.backends.keras.keras_compiled import CompiledLoss, inputs_of
from hpctrain.backends.tensorflow.steps.passes import BatchScore, KerasPasses, Tensors, loss_of_nothing, score_of
from hpctrain.errors import UserError
from hpctrain.system.user_errors import blamed, described, shapes, trained_weight
from hpctrain.tasks.definition import KerasTask
from hpctrain.tasks.mean_check import TOLERANCE, TOLERANCE_16_BITS, LossReader, require_mean


def read(score: Any, samples: int) -> tuple[float, float, float]:
    """See mean_check.LossReader."""
    total, weight = score if isinstance(score, (tuple, list)) else (score * samples, samples)
    is_low = tf.convert_to_tensor(total).dtype.size < 4
    return float(total), float(weight), TOLERANCE_16_BITS if is_low else TOLERANCE


KERAS = LossReader(read, tf.nest.map_structure, tf.identity)


def try_training(task: KerasTask, passes: KerasPasses, batch: Tensors) -> None:
    """Raises UserError if the loss cannot be computed, has no gradients, or is not a mean over samples."""
    variables = [variable.value for variable in task.model.trainable_variables]
    with tf.GradientTape(persistent=True) as tape:
        scores = judged(passes, batch, loss_of(task), training=True)
    if scores and all(gradient is None for gradient in tape.gradient(scores[0].total, variables)):
        raise loss_of_nothing()
    if scores and any(gradient is not None for gradient in tape.gradient(scores[0].weight, variables)):
        raise trained_weight("loss", "tf.stop_gradient(weight)")
    require_mean_penalties(task, passes, batch)


def require_mean_penalties(task: KerasTask, passes: KerasPasses, batch: Tensors) -> None:
    """Raises UserError if what layers give to ``add_loss`` is neither a mean over samples nor constant."""

    def penalty(_: None, some: Tensors) -> tf.Tensor:
        passes.outputs(some, training=False)
        return tf.add_n([tf.cast(one, tf.float32) for one in task.model.losses])

    regularizers = [one for one in task.model.trainable_variables if one.regularizer is not None]
    if len(task.model.losses) > len(regularizers):
        fix = "add the mean over the samples: self.add_loss(keras.ops.mean(...))"
        require_mean(KERAS, "what layers give to add_loss", penalty, None, batch, fix=fix)


def try_mean(task: KerasTask, passes: KerasPasses, batch: Tensors) -> None:
    """Raises UserError if the loss of these samples is not a mean; calls the model, see ``require_mean``."""
    require_mean(KERAS, "loss", task.loss, None, batch, functools.partial(passes.outputs, training=False))


def try_evaluation(task: KerasTask, passes: KerasPasses, batch: Tensors) -> None:
    """Raises UserError if the loss or a metric of an evaluation cannot be computed."""
    metrics = {f"metrics[{key!r}]": metric for key, metric in task.mean_metrics.items()}
    judged(passes, batch, loss_of(task) | metrics, training=False)
    if isinstance(task.loss, CompiledLoss):
        with blamed("metrics of compile", "compile the model with metrics of the targets that fit_data gives"):
            task.loss.scores(passes.outputs(batch, training=False), batch)


def loss_of(task: KerasTask) -> dict[str, Any]:
    """The loss by its field; empty if there is none, as with a custom ``train_step``."""
    return {"loss": task.loss} if task.loss is not None else {}


def judged(passes: KerasPasses, batch: Tensors, judges: Mapping[str, Any], training: bool) -> list[BatchScore]:
    """Applies the task's functions, by field, to the model's outputs."""
    with blamed("the model or forward", inputs_of(passes.task, batch)):
        outputs = passes.outputs(batch, training)
    if outputs is None:
        raise UserError("the model or forward returned None", "return the outputs: a return is missing")
    scores = []
    for name, judge in judges.items():
        arguments = f"outputs {described(outputs)}, and the batch, a dict of {shapes(batch)}"
        fix = f"{name} gets (outputs, batch){'' if training else ' in an evaluation'}: {arguments}"
        with blamed(name, fix):
            score = judge(outputs, batch)
        if score is None:
            raise UserError(f"{name} returned None", "a return is missing: return a scalar, or (sum, weight)")
        with blamed(name, "return its mean over the samples, a scalar, or (sum, weight), two scalars"):
            scores.append(score_of(score, batch, name))
        require_mean(KERAS, name, judge, outputs, batch, functools.partial(passes.outputs, training=False))
    return scores
