"""A KerasTask on Keras' PyTorch backend as a TorchTask, with the meaning that ``compile`` and ``fit`` have."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np
import torch
from torch import Tensor

from hpctrain.backends.keras.keras_compiled import CompiledLoss, inputs_of
from hpctrain.backends.keras.keras_meter import KerasMeter
from hpctrain.backends.keras.keras_model import (
    POLICIES,
    InMode,
    lacks_weights,
    optimizer_features,
    save_keras,
    trains_itself,
)
from hpctrain.backends.named_state import load_tensors
from hpctrain.backends.torch.keras.keras_module import KerasModule
from hpctrain.backends.torch.keras.keras_optimizer import KerasOptimizer
from hpctrain.backends.torch.state.tensors import model_tensors
from hpctrain.config.combinations import refusal
from hpctrain.config.features import Feature
from hpctrain.errors import UserError
from hpctrain.system.array_types import Array
from hpctrain.system.user_errors import blamed, shapes
from hpctrain.tasks.definition import KerasTask, TorchTask
from hpctrain.tasks.meters import KerasMetric, meters_of
from hpctrain.train.metrics import Meter


@dataclass(frozen=True)
class KerasOnTorch(TorchTask):
    """A KerasTask that PyTorch trains. Its metric objects are those of Keras."""

    keras_features: Mapping[Feature, Any] = field(default_factory=dict)

    @property
    def given_loss(self) -> Any:
        """The loss of the KerasTask, which ``penalised`` calls."""
        return self.loss.args[-1]

    @property
    def own_features(self) -> Mapping[Feature, Any]:
        return self.keras_features

    @property
    def own_meters(self) -> dict[str, Meter]:
        """Meters of the metrics that keep state."""
        return meters_of(self.metrics, KerasMetric, "Keras", KerasMeter)


def on_torch(task: KerasTask, precision: str, samples: Callable[[], Mapping[str, Array]]) -> KerasOnTorch:
    """Makes a TorchTask of a Keras task whose loss is a function.

    Args:
        task: the task.
        precision: ``train.precision``.
        samples: makes example arrays of a batch, if the model must be built.

    Raises:
        UserError: the model cannot be built, or cannot be trained on this backend.
    """
    if trains_itself(task.model):
        raise refusal({Feature.KERAS_ON_TORCH: True, Feature.TRAIN_STEP: type(task.model).__name__})
    if lacks_weights(task.model):
        build_weights(task, samples())
    kind = type(task.optimizer)
    if not issubclass(kind, keras.optimizers.Optimizer):
        raise UserError(
            f"the model is one of Keras, and optimizer of the task is a {kind.__module__}.{kind.__name__}",
            "give an optimizer of Keras, such as keras.optimizers.Adam(1e-3)",
        )
    if not task.model.trainable_variables:
        raise UserError("the Keras model has no weight to train", "leave some layers trainable")
    features = optimizer_features(task, POLICIES[precision])
    module = KerasModule(task.model)
    metrics = dict(task.metrics)
    if isinstance(task.loss, CompiledLoss) and task.model._compile_metrics is not None:
        scores = CompiledScores(task.loss)
        metrics |= {name: functools.partial(scores, name) for name in task.model._compile_metrics.result()}
    given = {one.name: getattr(task, one.name) for one in dataclasses.fields(KerasTask) if one.name != "fit_data"}
    given |= {
        "model": module,
        "loss": functools.partial(penalised, module, task.loss),
        "optimizer": KerasOptimizer(task.optimizer, module),
        "metrics": metrics,
        "forward": functools.partial(applied, task.forward),
        "keras_features": {**features, Feature.KERAS_ON_TORCH: True},
    }
    return KerasOnTorch(**given)


def applied(forward: Callable[[Any, Any], Any], module: Any, batch: Mapping[str, Tensor]) -> Any:
    """Applies a task's ``forward`` through the module."""
    return module(batch, forward)


def penalised(module: KerasModule, loss: Callable[[Any, Any], Any], outputs: Any, batch: Mapping[str, Tensor]) -> Any:
    """The task's loss plus the model's penalties, weighted like the samples."""
    with torch.autocast(next(iter(batch.values())).device.type, enabled=False):
        score = loss(outputs, batch)
    if isinstance(score, (tuple, list)):
        total, weight = score
        return total + torch.as_tensor(weight).detach() * module.penalty, weight
    return score + module.penalty


@dataclass
class CompiledScores:
    """(sum, weight) of compiled metrics, computed once for a batch, and kept until each has been asked for."""

    loss: CompiledLoss
    seen: tuple[int, Any] = (0, None)
    """Identity of the outputs, which may be large and are not kept, and the batch."""
    found: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __call__(self, name: str, outputs: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The score of one of them."""
        if self.seen[0] != id(outputs) or self.seen[1] is not batch or name not in self.found:
            scores = self.loss.scores(outputs, batch)
            self.seen = id(outputs), batch
            self.found = {key: (total.clone(), weight.clone()) for key, (total, weight) in scores.items()}
        score = self.found.pop(name)
        if not self.found:
            self.seen = 0, None
        return score


def build_weights(task: KerasTask, samples: Mapping[str, Array]) -> None:
    """Calls the model, its loss and compiled metrics on a batch, so that layers create their weights.

    Raises UserError if one of them fails.
    """
    batch = {name: keras.ops.convert_to_tensor(np.asarray(array)) for name, array in samples.items()}
    with torch.no_grad(), blamed("the model or forward", inputs_of(task, batch)):
        outputs = InMode(functools.partial(task.forward, task.model))(batch, training=False)
    if outputs is not None and isinstance(task.loss, CompiledLoss):  # the dry call reports a missing return
        with torch.no_grad(), blamed("compile's loss or metrics", f"they get outputs and a dict of {shapes(batch)}"):
            task.loss(outputs, batch)
            task.loss.scores(outputs, batch)


def export_keras(model: Any, arrays: Mapping[str, Array], path: Path) -> None:
    """Writes a file of the KerasModule's model; see ``backends.tensorflow.state.weights``."""
    load_tensors(model_tensors(model), arrays)
    save_keras(model.keras_model, path)
