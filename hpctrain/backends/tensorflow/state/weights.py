"""Weights of Keras models that make them at their first call: subclassed ones, and layers without an input shape;
and weights as ``.weights.h5`` files."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import keras
from numpy.typing import NDArray

from hpctrain.backends.named_state import load_tensors
from hpctrain.backends.tensorflow.framework import KerasFramework
from hpctrain.backends.tensorflow.state.tensors import model_tensors
from hpctrain.backends.tensorflow.steps.compiled import CompiledLoss
from hpctrain.backends.tensorflow.steps.own_step import build_by_own_step
from hpctrain.backends.tensorflow.steps.passes import InMode, Tensors, score_of
from hpctrain.backends.tensorflow.task.overrides import trains_itself
from hpctrain.data.dataset import Samples
from hpctrain.errors import HpctrainError
from hpctrain.tasks.definition import KerasTask
from hpctrain.tasks.user_errors import blame, shapes
from hpctrain.train.framework import StateSource

BY_MODEL = "the model or forward"


def lacks_weights(model: keras.Model) -> bool:
    """Whether a layer, or what ``compile`` has set, is still to be built, or a model's own step may have to build it.

    ``model.built`` does not say: ``build(shape)`` alone sets it, too.
    """
    compiled = [model._compile_loss, model._compile_metrics] if isinstance(model, keras.Model) else []
    waiting = [one for one in [*model._flatten_layers(), *compiled] if one is not None and not one.built]
    return trains_itself(model) or bool(waiting)


def build_weights(task: KerasTask, samples: Samples) -> None:
    """Traces forward pass, loss and metrics, or a model's own step, so that every layer and optimizer makes its
    weights; nothing is computed.

    Args:
        task: whose model is to be built.
        samples: arrays such as the task's batches hold, with any number of samples.
    """
    if trains_itself(task.model):
        build_by_own_step(task, samples)
        return
    batch = {name: keras.KerasTensor((None, *array.shape[1:]), array.dtype.name) for name, array in samples.items()}

    doing = BY_MODEL
    refused: list[HpctrainError] = []

    def judge(batch: Tensors) -> None:
        nonlocal doing
        outputs = task.forward(task.model, batch)
        if outputs is None:
            return  # the dry call says so
        judges = {"loss": task.loss, **{f"metrics[{key!r}]": metric for key, metric in task.mean_metrics.items()}}
        for name, function in judges.items():
            doing = name
            score_of(function(outputs, batch), batch)
        if isinstance(task.loss, CompiledLoss):
            doing = "metrics of compile"
            task.loss.scores(outputs, batch)

    def call(batch: Tensors) -> None:
        try:
            judge(batch)
        except HpctrainError as error:  # Keras would make another one of its class
            refused.append(error)

    try:
        for training in (True, False):
            InMode(call)(batch, training=training)
    except Exception as error:
        given = "forward(model, batch) gets the model and" if doing == BY_MODEL else f"{doing} gets the outputs and"
        raise blame(
            doing, f"{given} a dict of {shapes(batch)}; by default a model gets its first array", error
        ) from error
    if refused:
        raise refused[0]


T = TypeVar("T")


def export_keras(model: keras.Model, arrays: Mapping[str, NDArray[Any]], path: Path) -> None:
    """Writes a file for ``model.load_weights(path)``.

    Args:
        model: built as for training; its weights are overwritten.
        arrays: of a checkpoint, by name (``model/...``).
        path: ends in ``.weights.h5``.

    Raises:
        UserError: a weight is missing or has another shape.
        OSError: the file cannot be written.
    """
    load_tensors(model_tensors(model), arrays)
    model.built = True  # one without ``call`` is not to Keras, though its own step has made its weights
    model.save_weights(path)


def through_file(framework: StateSource, change: Callable[[Path], T]) -> T:
    """Has a Keras model load a file of its weights after a change; averages begin at what it loads.

    Args:
        framework: has the model.
        change: gets the path of a ``.weights.h5`` file that it may change in place.

    Returns:
        What ``change`` returned.
    """
    assert isinstance(framework, KerasFramework), "of a Keras task"
    model = framework.task.model
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "own.weights.h5"
        model.save_weights(path)
        found = change(path)
        model.load_weights(path)
    framework.source.begin_averages()
    return found
