"""A task's forward pass, loss and metrics on one batch, eagerly; errors name the field and the user's line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from hpctrain.errors import UserError
from hpctrain.frameworks.tensorflow.passes import Passes, Tensors, score_of
from hpctrain.tasks.blame import blamed, shapes
from hpctrain.tasks.definition import KerasTask


def try_batch(task: KerasTask, passes: Passes, batch: Tensors) -> None:
    """Raises UserError if the loss, or what an evaluation needs, cannot be computed."""
    judges = {"loss": task.loss}
    for training in (True, False) if task.validation is not None else (True,):
        fix = f"forward(model, batch) gets the model and a dict of {shapes(batch)}; by default the first array"
        with blamed("the model or forward", fix):
            outputs = passes.outputs(batch, training)
        if outputs is None:
            raise UserError("the model or forward returned None", "return the outputs: a return is missing")
        for name, judge in judges.items():
            fix = f"{name} gets (outputs, batch): outputs {describe(outputs)}, and the batch, a dict of {shapes(batch)}"
            with blamed(name, fix):
                score = judge(outputs, batch)
            if score is None:
                raise UserError(f"{name} returned None", "a return is missing: return a scalar, or (sum, weight)")
            with blamed(name, "return its mean over the samples, a scalar, or (sum, weight), two scalars"):
                score_of(score, batch, name)
        judges |= {f"metrics[{key!r}]": metric for key, metric in task.mean_metrics.items()}


def describe(outputs: Any) -> str:
    """Shapes and types, in words."""
    if isinstance(outputs, Mapping):
        return f"a dict of {shapes(outputs)}"
    if isinstance(outputs, tf.Tensor):
        return f"a tensor of shape {list(outputs.shape)}"
    return f"a {type(outputs).__name__}"
