"""Sums sparse gradients of Keras embeddings by rows, next to the pieces of all other gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from hpctrain.backends.tensorflow.keras_reducer import Callback, Pieces, exchanged_dtype, notify, on_host
from hpctrain.comm.group import Group
from hpctrain.reduce.row_exchange import RowExchange, SparseRows
from hpctrain.system.array_types import Array
from hpctrain.train.framework import StepSettings


class Gradients:
    """Packs gradients into the tensors to exchange: rows of tables, then the pieces of all others.

    Args:
        variables: the trained variables, in the order in which gradients are given and returned.
        tables: variables among them that are exchanged by rows.
        group: the ranks. Collective over them if there are tables.
    """

    def __init__(self, variables: Sequence[keras.Variable], tables: Sequence[keras.Variable], group: Group) -> None:
        ids = {id(variable) for variable in tables}
        self.is_table = [id(variable) in ids for variable in variables]
        self.rows_of, others = self.parted(variables)
        self.pieces = Pieces(others)
        self.tables = SparseTables(self.rows_of, group, exchanged_dtype(self.rows_of))

    def pack_with(self, gradients: Sequence[Any], slots: Mapping[int, Any]) -> list[tf.Tensor]:
        """See Pieces; a gradient of a table may be tf.IndexedSlices, dense, or None."""
        of_tables, others = self.parted(gradients)
        return [*self.tables.pack(of_tables), *self.pieces.pack_with(others, slots)]

    def parted(self, values: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Splits one value for each variable into those of tables and all others."""
        of_tables: list[Any] = []
        others: list[Any] = []
        for value, is_table in zip(values, self.is_table, strict=True):
            (of_tables if is_table else others).append(value)
        return of_tables, others

    def apart(self, tensors: Sequence[tf.Tensor]) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Splits tensors into rows and pieces."""
        cut = 2 * len(self.tables.shapes)
        return list(tensors[:cut]), list(tensors[cut:])

    def added(self, tensors: Sequence[tf.Tensor], more: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Adds the gradients of two micro-batches."""
        (rows, pieces), (more_rows, more_pieces) = self.apart(tensors), self.apart(more)
        summed = [old + new for old, new in zip(pieces, more_pieces, strict=True)]
        return [*self.tables.joined(rows, more_rows), *summed]

    def unpack(self, rows: Sequence[tf.Tensor], pieces: Sequence[tf.Tensor], as_rows: bool) -> list[Any]:
        """Unpacks the gradients in the order of the variables; those of tables as tf.IndexedSlices or dense."""
        of_tables: Iterator[Any] = iter(self.tables.unpack(rows) if as_rows else self.tables.whole(rows))
        others = iter(self.pieces.unpack(pieces))
        return [next(of_tables if is_table else others) for is_table in self.is_table]

    def zeros(self) -> list[tf.Tensor]:
        """Tensors of a rank whose part of the batch is empty."""
        return [*self.tables.pack([None] * len(self.tables.shapes)), *self.pieces.zeros()]

    def specs(self) -> list[tf.TensorSpec]:
        """Specs of the packed tensors."""
        pieces = [tf.TensorSpec(piece.shape, piece.dtype) for piece in self.pieces.zeros()]
        return [*self.tables.specs(), *pieces]

    def close(self) -> None:
        """Frees the communicator."""
        self.tables.close()


class SparseTables:
    """Packs rows of some tables: for each, a tensor of unique indices followed by one of values.

    Args:
        variables: the tables, each with two axes.
        group: the ranks; a single process needs no exchange.
        dtype: dtype in which gradients are exchanged.
    """

    def __init__(self, variables: Sequence[keras.Variable], group: Group, dtype: tf.DType) -> None:
        self.shapes = [(variable.shape[0], variable.shape[1]) for variable in variables]
        self.dtype = dtype
        several = bool(variables) and group.size > 1
        self.rows = RowExchange(group, self.shapes, dtype.as_numpy_dtype) if several else None

    def pack(self, gradients: Sequence[Any]) -> list[tf.Tensor]:
        """Packs gradients; a dense one (of a table also used as a matrix) contributes all rows."""
        packed = []
        for gradient, (rows, columns) in zip(gradients, self.shapes, strict=True):
            if gradient is None:
                packed += [tf.zeros((0,), tf.int64), tf.zeros((0, columns), self.dtype)]
            elif isinstance(gradient, tf.IndexedSlices):
                indices, places = tf.unique(tf.reshape(tf.cast(gradient.indices, tf.int64), (-1,)))
                values = tf.reshape(tf.cast(gradient.values, self.dtype), (-1, columns))
                packed += [indices, tf.math.unsorted_segment_sum(values, places, tf.size(indices))]
            else:
                packed += [tf.range(rows, dtype=tf.int64), tf.cast(gradient, self.dtype)]
        return packed

    def joined(self, packed: Sequence[tf.Tensor], more: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Joins the rows of two micro-batches."""
        both = [tf.concat(pair, 0) for pair in zip(packed, more, strict=True)]
        return self.pack(self.unpack(both))

    def sum(self, packed: Sequence[tf.Tensor], after: Callback = None) -> list[tf.Tensor]:
        """Sums rows over the ranks. Collective; on one process it returns its input.

        Args:
            packed: this rank's packed rows.
            after: called when the sums of several ranks are complete.
        """
        if self.rows is None:
            return list(packed)

        def exchanged(*arrays: Array) -> list[Array]:
            sums = self._sum(*arrays)
            notify(after)
            return sums

        sums: list[tf.Tensor] = on_host(exchanged, packed, [tensor.dtype for tensor in packed])
        for total, spec in zip(sums, self.specs(), strict=True):
            total.set_shape(spec.shape)
        return sums

    def unpack(self, packed: Sequence[tf.Tensor]) -> list[tf.IndexedSlices]:
        """Unpacks rows as tf.IndexedSlices, the form that optimizers accept."""
        parts = zip(packed[::2], packed[1::2], self.shapes, strict=True)
        return [tf.IndexedSlices(values, indices, tf.constant(shape, tf.int64)) for indices, values, shape in parts]

    def whole(self, packed: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Unpacks rows as dense tensors."""
        parts = zip(packed[::2], packed[1::2], self.shapes, strict=True)
        return [tf.math.unsorted_segment_sum(values, indices, rows) for indices, values, (rows, _) in parts]

    def scaled(self, packed: Sequence[tf.Tensor], factor: tf.Tensor) -> list[tf.Tensor]:
        """Multiplies rows by a scalar; 0 times anything, even NaN, is 0."""
        found, factor = list(packed), tf.cast(factor, self.dtype)
        found[1::2] = [tf.math.multiply_no_nan(values, factor) for values in packed[1::2]]
        return found

    def square(self, packed: Sequence[tf.Tensor]) -> tf.Tensor:
        """Squared L2 norm."""
        squares = [2.0 * tf.nn.l2_loss(values) for values in packed[1::2]]
        return tf.add_n(squares) if squares else tf.zeros((), self.dtype)

    def specs(self) -> list[tf.TensorSpec]:
        """Specs of packed rows."""
        found = []
        for _, columns in self.shapes:
            found += [tf.TensorSpec((None,), tf.int64), tf.TensorSpec((None, columns), self.dtype)]
        return found

    def close(self) -> None:
        """Frees the communicator."""
        if self.rows is not None:
            self.rows.close()
            self.rows = None

    def _sum(self, *packed: Array) -> list[Array]:
        assert self.rows is not None, "only traced where ranks exchange"
        sums = self.rows.sum(list(map(SparseRows, packed[::2], packed[1::2])))
        return [part for rows in sums for part in (rows.indices, rows.values)]


SMALLEST = 2**18
"""Smallest table in elements: smaller ones are summed faster densely than by rows."""


def sparse_variables(
    variables: Sequence[keras.Variable],
    model: keras.Model,
    optimizer: keras.optimizers.Optimizer,
    config: StepSettings,
    ranks: int,
) -> list[keras.Variable]:
    """Selects large tables of ``keras.layers.Embedding`` without a penalty (whose gradient covers all rows).

    Selects none under ``train.compile``, since XLA does not support tensors whose size depends on values; none in 16
    bits, where gradients of tables are dense; and none on one process if the optimizer changes all rows anyway.

    Args:
        variables: the variables that ``optimizer`` trains.
        model: their model.
        config: settings of an update.
        ranks: number of ranks that exchange gradients.
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
    """In the body, embeddings read only the rows that they look up; Keras would copy the whole table each time.

    Patches the class and restores it at the end. Only for tables updated by rows: after such updates TensorFlow copies
    a variable that is read whole.
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
    """In the body, Adagrad reads only the updated rows of its accumulator; each row occurs once in a gradient.

    Keras takes the root of the whole accumulator each time; results agree up to rounding. Patches the class and
    restores it at the end.
    """
    original = keras.optimizers.Adagrad.update_step

    def update_step(self: keras.optimizers.Adagrad, gradient: Any, variable: Any, learning_rate: Any) -> None:
        if not isinstance(gradient, tf.IndexedSlices):
            original(self, gradient, variable, learning_rate)
            return
        accumulator = self._accumulators[self._get_variable_index(variable)].value
        values = tf.cast(gradient.values, variable.dtype)
        rate = tf.cast(learning_rate, variable.dtype)
        accumulator.scatter_add(tf.IndexedSlices(tf.square(values), gradient.indices))
        roots = tf.sqrt(accumulator.sparse_read(gradient.indices) + self.epsilon)
        variable.scatter_sub(tf.IndexedSlices(rate * values / roots, gradient.indices))

    keras.optimizers.Adagrad.update_step = update_step
    try:
        yield
    finally:
        keras.optimizers.Adagrad.update_step = original


def updates_rows_alone(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether the optimizer leaves rows unchanged that are missing in tf.IndexedSlices or have zero dense gradients."""
    plain = not (
        optimizer.weight_decay
        or optimizer.clipnorm
        or optimizer.clipvalue
        or optimizer.global_clipnorm
        or optimizer.use_ema
        or optimizer.gradient_accumulation_steps
        or optimizer.loss_scale_factor  # Keras divides gradients by it, but tf.IndexedSlices cannot be divided
    )
    kind = type(optimizer)
    return plain and (kind is keras.optimizers.Adagrad or (kind is keras.optimizers.SGD and not optimizer.momentum))
