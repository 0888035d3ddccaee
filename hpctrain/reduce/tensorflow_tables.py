"""Gradients of Keras embeddings that stay sparse, beside the pieces of all others, in TensorFlow functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from numpy.typing import NDArray

from hpctrain.comm.group import Group
from hpctrain.reduce.row_exchange import RowExchange, Rows


class Tables:
    """Rows of some tables: for each, a tensor of indices, each once, and one of values behind it.

    Args:
        variables: the tables; each has two axes.
        group: the ranks; those of one process need no exchange.
        dtype: in which gradients are exchanged.
    """

    def __init__(self, variables: Sequence[keras.Variable], group: Group, dtype: tf.DType) -> None:
        self.shapes = [(variable.shape[0], variable.shape[1]) for variable in variables]
        self.dtype = dtype
        several = bool(variables) and group.size > 1
        self.rows = RowExchange(group, self.shapes, dtype.as_numpy_dtype) if several else None

    def pack(self, gradients: Sequence[Any]) -> list[tf.Tensor]:
        """Rows of gradients as TensorFlow gives them; of a dense one, and so of a table that is a matrix too, all."""
        packed = []
        for gradient, (rows, columns) in zip(gradients, self.shapes, strict=True):
            if gradient is None:
                gradient = tf.IndexedSlices(tf.zeros((0, columns), self.dtype), tf.zeros((0,), tf.int64))
            if isinstance(gradient, tf.IndexedSlices):
                indices, places = tf.unique(tf.reshape(tf.cast(gradient.indices, tf.int64), (-1,)))
                values = tf.reshape(tf.cast(gradient.values, self.dtype), (-1, columns))
                packed += [indices, tf.math.unsorted_segment_sum(values, places, tf.size(indices))]
            else:
                packed += [tf.range(rows, dtype=tf.int64), tf.cast(gradient, self.dtype)]
        return packed

    def zeros(self) -> list[tf.Tensor]:
        """What a rank contributes whose part of the batch is empty."""
        return self.pack([None] * len(self.shapes))

    def joined(self, packed: Sequence[tf.Tensor], more: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Rows of two micro-batches."""
        both = [tf.concat(pair, 0) for pair in zip(packed, more, strict=True)]
        slices = zip(both[1::2], both[::2], strict=True)
        return self.pack([tf.IndexedSlices(values, indices) for values, indices in slices])

    def sum(self, packed: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The sums over the ranks, which all meet in it; the same of one process."""
        if self.rows is None:
            return list(packed)
        sums: list[tf.Tensor] = tf.numpy_function(self._sum, packed, [tensor.dtype for tensor in packed])
        for number, (_, columns) in enumerate(self.shapes):
            sums[2 * number].set_shape((None,))
            sums[2 * number + 1].set_shape((None, columns))
        return sums

    def unpack(self, packed: Sequence[tf.Tensor]) -> list[tf.IndexedSlices]:
        """As optimizers take them."""
        parts = zip(packed[::2], packed[1::2], self.shapes, strict=True)
        return [tf.IndexedSlices(values, indices, tf.constant(shape, tf.int64)) for indices, values, shape in parts]

    def square(self, packed: Sequence[tf.Tensor]) -> tf.Tensor:
        """Of the L2 norm."""
        return tf.add_n([2.0 * tf.nn.l2_loss(values) for values in packed[1::2]])

    def close(self) -> None:
        """Frees the communicator."""
        if self.rows is not None:
            self.rows.close()

    def _sum(self, *packed: NDArray[Any]) -> list[NDArray[Any]]:
        assert self.rows is not None, "only traced where ranks exchange"
        given = [Rows(indices, values) for indices, values in zip(packed[::2], packed[1::2], strict=True)]
        return [part for rows in self.rows.sum(given) for part in (rows.indices, rows.values)]
