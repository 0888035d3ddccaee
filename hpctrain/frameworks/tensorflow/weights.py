"""Weights of Keras models that make them at their first call: subclassed ones, and layers without an input shape."""

from __future__ import annotations

import keras

from hpctrain.data.dataset import Samples
from hpctrain.frameworks.tensorflow.passes import InMode, Tensors, score_of
from hpctrain.tasks.definition import KerasTask


def lacks_weights(model: keras.Model) -> bool:
    """Whether some layer is still to be built. ``model.built`` does not say: ``build(shape)`` alone sets it, too."""
    return any(not layer.built for layer in model._flatten_layers())


def build_weights(task: KerasTask, samples: Samples) -> None:
    """Traces forward pass, loss and metrics once, so that every layer makes its weights; nothing is computed.

    Args:
        task: whose model is to be built.
        samples: arrays such as the task's batches hold, with any number of samples.
    """
    batch = {name: keras.KerasTensor((None, *array.shape[1:]), array.dtype.name) for name, array in samples.items()}

    def call(batch: Tensors) -> None:
        outputs = task.forward(task.model, batch)
        for judge in (task.loss, *task.mean_metrics.values()):
            score_of(judge(outputs, batch), batch)

    for training in (True, False):
        InMode(call)(batch, training=training)
