"""The gradients of a Keras model as a few tensors that travel together, and back, in TensorFlow functions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from hpctrain.reduce.exchange_slots import LOSS, SLOTS
from hpctrain.reduce.layout import plan

STACKED = 16384
"""Elements: smaller gradients of one shape travel as one tensor. A tensor more costs as much as copying these."""


class Pieces:
    """Which gradients make which tensor: large ones are taken as they are, small ones of one shape are stacked.

    The last piece holds numbers that travel along, such as the loss. TensorFlow makes and takes apart all of them in a
    few operations.

    Args:
        variables: those to train, in the order in which gradients are given and returned.
    """

    def __init__(self, variables: Sequence[keras.Variable]) -> None:
        shapes = [tuple(variable.shape) for variable in variables]
        self.dtype = exchanged_dtype(variables)
        """In which gradients are exchanged."""
        self.groups = grouped(shapes)
        """Indices of the variables of each piece."""
        self.variable_shapes = shapes
        self.shapes = [
            shapes[group[0]] if len(group) == 1 else (len(group), *shapes[group[0]]) for group in self.groups
        ]
        """Of all pieces but the last."""
        self.layout = plan([math.prod(shape) for shape in self.shapes], None, SLOTS)
        """Of the pieces in one flat buffer, for sums that need one."""

    def pack(self, gradients: Sequence[Any], loss: Any) -> list[tf.Tensor]:
        """The pieces, to be summed over the ranks.

        Args:
            gradients: in the order of the variables, each of its variable's shape; dense.
            loss: scalar, this rank's part of the mean loss over all ranks' samples.
        """
        return self.pack_with(gradients, {LOSS: loss})

    def mean_loss(self, pieces: Sequence[tf.Tensor]) -> tf.Tensor:
        """The loss in summed pieces: a scalar."""
        return pieces[-1][LOSS]

    def pack_with(self, gradients: Sequence[Any], slots: Mapping[int, Any]) -> list[tf.Tensor]:
        """The pieces, with scalars by their place among the slots; zeros elsewhere."""
        known = [tf.cast(gradient, self.dtype) for gradient in gradients]
        for gradient, shape in zip(known, self.variable_shapes, strict=True):
            gradient.set_shape(shape)  # TensorFlow itself does not know that of Dense over three axes, for one
        packed = [
            known[group[0]] if len(group) == 1 else tf.stack([known[index] for index in group]) for group in self.groups
        ]
        return [*packed, tf.stack([tf.cast(slots.get(slot, 0.0), self.dtype) for slot in range(SLOTS)])]

    def unpack(self, pieces: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The gradients in such pieces, in the order of the variables.

        Args:
            pieces: of ``pack``, summed over the ranks; the last one may be left out.
        """
        found: dict[int, tf.Tensor] = {}
        for group, piece in zip(self.groups, pieces, strict=False):
            found.update(zip(group, [piece] if len(group) == 1 else tf.unstack(piece), strict=True))
        return [found[index] for index in range(len(self.variable_shapes))]

    def zeros(self) -> list[tf.Tensor]:
        """What a rank contributes whose part of the batch is empty."""
        return [tf.zeros(shape, self.dtype) for shape in [*self.shapes, (SLOTS,)]]


def exchanged_dtype(variables: Sequence[keras.Variable]) -> tf.DType:
    """In which gradients of these are summed."""
    return tf.float64 if any(variable.dtype == "float64" for variable in variables) else tf.float32


def grouped(shapes: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Indices of small arrays of one shape together, all others alone; in the order of each group's first."""
    groups: dict[Any, list[int]] = {}
    for index, shape in enumerate(shapes):
        groups.setdefault(shape if math.prod(shape) < STACKED else index, []).append(index)
    return [tuple(group) for group in groups.values()]


def join(pieces: Sequence[tf.Tensor]) -> tf.Tensor:
    """One flat tensor of all pieces, in their order."""
    return tf.concat([tf.reshape(piece, (-1,)) for piece in pieces] or [tf.zeros((0,))], 0)


def split(flat: tf.Tensor, like: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Undoes ``join``."""
    parts = tf.split(flat, [math.prod(piece.shape) for piece in like]) if like else []
    return [tf.reshape(part, piece.shape) for part, piece in zip(parts, like, strict=True)]
