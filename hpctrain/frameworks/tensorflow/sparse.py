"""Which weights of a Keras model have gradients whose rows travel alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from hpctrain.config.sections import Config

SMALLEST = 2**18
"""Elements of a table: a smaller one is summed in less time than the messages of its rows take."""


def sparse_variables(
    variables: Sequence[keras.Variable],
    model: keras.Model,
    optimizer: keras.optimizers.Optimizer,
    config: Config,
    ranks: int,
) -> list[keras.Variable]:
    """Those that are large tables of ``keras.layers.Embedding`` and have no penalty, since its gradient has all rows.

    None under ``train.compile``, since XLA knows no tensors whose size depends on values; none in 16 bits, where
    gradients of tables are dense; and none in one process if the optimizer changes all rows anyway.

    Args:
        variables: those that ``optimizer`` trains.
        model: they are in it.
        config: of the run.
        ranks: those that exchange.
    """
    train = config.train
    if config.reduce.sparse != "auto" or train.compile or train.precision != "fp32":
        return []
    if ranks == 1 and not updates_rows_alone(optimizer):
        return []
    tables = {
        id(variable)
        for layer in model._flatten_layers()
        if type(layer) is keras.layers.Embedding and layer.embeddings_regularizer is None
        for variable in layer.trainable_variables
        if variable.name == "embeddings"
    }
    return [one for one in variables if id(one) in tables and one.shape[0] * one.shape[1] >= SMALLEST]


@contextlib.contextmanager
def rows_read_alone(tables: Sequence[keras.Variable]) -> Iterator[None]:
    """In the body, embeddings read the rows of these tables that they look up. Keras has them copy all, each time.

    It is the class that is changed, and changed back at the end. Only for tables that are updated by rows alone: it is
    such an update after which TensorFlow copies a variable that is read whole.
    """
    ids = {id(variable) for variable in tables}
    original = keras.layers.Embedding.embeddings

    def embeddings(self: keras.layers.Embedding) -> Any:
        variable = original.fget(self)
        return variable.value if id(variable) in ids else variable

    keras.layers.Embedding.embeddings = property(embeddings)
    try:
        yield
    finally:
        keras.layers.Embedding.embeddings = original


@contextlib.contextmanager
def rows_updated_alone() -> Iterator[None]:
    """In the body, Adagrad reads of its accumulator only the rows that it updates, each of which it gets once.

    Keras takes the root of all of it, each time; the numbers are the same to rounding. It is the class that is changed,
    and changed back at the end.
    """
    original = keras.optimizers.Adagrad.update_step

    def update_step(self: keras.optimizers.Adagrad, gradient: Any, variable: Any, learning_rate: Any) -> None:
        if not isinstance(gradient, tf.IndexedSlices):
            original(self, gradient, variable, learning_rate)
            return
        accumulator = self._accumulators[self._get_variable_index(variable)].value
        values, rate = tf.cast(gradient.values, variable.dtype), tf.cast(learning_rate, variable.dtype)
        accumulator.scatter_add(tf.IndexedSlices(tf.square(values), gradient.indices))
        roots = tf.sqrt(accumulator.sparse_read(gradient.indices) + self.epsilon)
        variable.scatter_sub(tf.IndexedSlices(rate * values / roots, gradient.indices))

    keras.optimizers.Adagrad.update_step = update_step
    try:
        yield
    finally:
        keras.optimizers.Adagrad.update_step = original


def updates_rows_alone(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether it leaves a row as it is that is not in tf.IndexedSlices, and whose gradient is zero when it is dense."""
    plain = not (
        optimizer.weight_decay
        or optimizer.clipnorm
        or optimizer.clipvalue
        or optimizer.global_clipnorm
        or optimizer.use_ema
        or optimizer.gradient_accumulation_steps
        or optimizer.loss_scale_factor  # Keras divides by it, which tf.IndexedSlices cannot
    )
    kind = type(optimizer)
    return plain and (kind is keras.optimizers.Adagrad or (kind is keras.optimizers.SGD and not optimizer.momentum))
