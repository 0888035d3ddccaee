"""Builds weights of Keras models that create them at their first call, and writes files of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import keras

from hpctrain.backends.keras.keras_compiled import CompiledLoss, inputs_of
from hpctrain.backends.keras.keras_model import InMode, save_keras, trains_itself
from hpctrain.backends.named_state import load_tensors
from hpctrain.backends.tensorflow.state.keras_tensors import model_tensors
from hpctrain.backends.tensorflow.steps.keras_own_step import build_by_own_step
from hpctrain.backends.tensorflow.steps.passes import Tensors, score_of
from hpctrain.data.dataset import Samples
from hpctrain.errors import HpctrainError
from hpctrain.system.array_types import Array
from hpctrain.system.user_errors import blamed, shapes
from hpctrain.tasks.definition import KerasTask


def build_weights(task: KerasTask, samples: Samples) -> None:
    """Traces forward pass, loss and metrics, or a custom step, so that layers and optimizers create their weights.

    Nothing is computed.

    Args:
        task: the task whose model is built.
        samples: example arrays of a batch, with any number of samples.
    """
    if trains_itself(task.model):
        build_by_own_step(task, samples)
        return
    batch = {name: keras.KerasTensor((None, *array.shape[1:]), array.dtype.name) for name, array in samples.items()}
    given = f"a dict of {shapes(batch)}"
    refused: list[HpctrainError] = []

    def judge(batch: Tensors) -> None:
        with blamed("the model or forward", inputs_of(task, batch)):
            outputs = task.forward(task.model, batch)
        if outputs is None:
            return  # the dry call reports it
        judges = {"loss": task.loss, **{f"metrics[{key!r}]": metric for key, metric in task.mean_metrics.items()}}
        for name, function in judges.items():
            with blamed(name, f"{name} gets the outputs and {given}"):
                score_of(function(outputs, batch), batch)
        if isinstance(task.loss, CompiledLoss):
            with blamed("metrics of compile", f"metrics of compile gets the outputs and {given}"):
                task.loss.scores(outputs, batch)

    def call(batch: Tensors) -> None:
        try:
            judge(batch)
        except HpctrainError as error:  # Keras would replace the error
            refused.append(error)

    for training in (True, False):
        InMode(call)(batch, training=training)
        if refused:
            raise refused[0]


def export_keras(model: keras.Model, arrays: Mapping[str, Array], path: Path) -> None:
    """Writes a file with ``save_keras``.

    Args:
        model: the model, built as for training; its weights are overwritten.
        arrays: arrays of a checkpoint, by name (``model/...``).
        path: path that ends in ``.weights.h5`` or ``.keras``.

    Raises:
        UserError: a weight is missing or has another shape, or Keras cannot save the whole model.
        OSError: the file cannot be written.
    """
    load_tensors(model_tensors(model), arrays)
    save_keras(model, path)
