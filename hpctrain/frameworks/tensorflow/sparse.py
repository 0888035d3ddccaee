"""Which weights of a Keras task keep their sparse gradients."""

from __future__ import annotations

import keras

from hpctrain.config.sections import Config
from hpctrain.tasks.definition import KerasTask


def sparse_variables(task: KerasTask, config: Config) -> list[keras.Variable]:
    """Tables of ``keras.layers.Embedding`` if the optimizer updates rows alone as it updates whole tables.

    None under ``train.compile``, since XLA knows no tensors whose size depends on values, and in 16 bits, where
    gradients of tables are dense.
    """
    train = config.train
    if config.reduce.sparse != "auto" or train.compile or train.precision != "fp32":
        return []
    if not updates_rows_alone(task.optimizer):
        return []
    trained = task.model.trainable_variables
    tables = {
        id(variable)
        for layer in task.model._flatten_layers()
        if isinstance(layer, keras.layers.Embedding)
        for variable in layer._trainable_variables
        if variable.name == "embeddings"
    }
    found = [variable for variable in trained if id(variable) in tables]
    return found if len(found) < len(trained) else []  # something dense has to carry the loss


def updates_rows_alone(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether a row whose gradient is zero would stay as it is, so that it may be left out."""
    plain = not (
        optimizer.weight_decay
        or optimizer.clipnorm
        or optimizer.clipvalue
        or optimizer.global_clipnorm
        or optimizer.use_ema
        or optimizer.gradient_accumulation_steps
    )
    kind = type(optimizer)
    return plain and (kind is keras.optimizers.Adagrad or (kind is keras.optimizers.SGD and not optimizer.momentum))
