"""A task's forward pass, loss and metrics on one batch, eagerly; errors name the field and the user's line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from hpctrain.errors import UserError
from hpctrain.frameworks.tensorflow.compiled import CompiledLoss
from hpctrain.frameworks.tensorflow.passes import BatchScore, Passes, Tensors, loss_of_nothing, score_of
from hpctrain.tasks.blame import blamed, shapes
from hpctrain.tasks.definition import KerasTask


def try_batch(task: KerasTask, passes: Passes, batch: Tensors) -> None:
    """Raises UserError if the loss, or what an evaluation needs, cannot be computed, or the loss not be trained on."""
    judges = {"loss": task.loss} if task.loss is not None else {}
    variables = [variable.value for variable in task.model.trainable_variables]
    with tf.GradientTape() as tape:
        scores = judged(passes, batch, judges, training=True)
    if scores and all(gradient is None for gradient in tape.gradient(scores[0].total, variables)):
        raise loss_of_nothing()
    if task.validation is None:
        return
    metrics = {f"metrics[{key!r}]": metric for key, metric in task.mean_metrics.items()}
    judged(passes, batch, judges | metrics, training=False)
    if isinstance(task.loss, CompiledLoss):
        with blamed("metrics of compile", "compile the model with metrics of the targets that fit_data gives"):
            task.loss.scores(passes.outputs(batch, training=False), batch)


def judged(passes: Passes, batch: Tensors, judges: Mapping[str, Any], training: bool) -> list[BatchScore]:
    """What functions of the task's, by field, say of the model's outputs."""
    fix = f"forward(model, batch) gets the model and a dict of {shapes(batch)}; by default the first array"
    with blamed("the model or forward", fix):
        outputs = passes.outputs(batch, training)
    if outputs is None:
        raise UserError("the model or forward returned None", "return the outputs: a return is missing")
    scores = []
    for name, judge in judges.items():
        fix = f"{name} gets (outputs, batch): outputs {describe(outputs)}, and the batch, a dict of {shapes(batch)}"
        with blamed(name, fix):
            score = judge(outputs, batch)
        if score is None:
            raise UserError(f"{name} returned None", "a return is missing: return a scalar, or (sum, weight)")
        with blamed(name, "return its mean over the samples, a scalar, or (sum, weight), two scalars"):
            scores.append(score_of(score, batch, name))
    return scores


def describe(outputs: Any) -> str:
    """Shapes and types, in words."""
    if isinstance(outputs, Mapping):
        return f"a dict of {shapes(outputs)}"
    if isinstance(outputs, tf.Tensor):
        return f"a tensor of shape {list(outputs.shape)}"
    return f"a {type(outputs).__name__}"
