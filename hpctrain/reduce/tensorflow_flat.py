"""All gradients of a Keras model as one tensor, and back, inside of TensorFlow functions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import keras
import tensorflow as tf

from hpctrain.reduce.exchange_slots import LOSS, SLOTS
from hpctrain.reduce.layout import ALIGNMENT, plan

ROW = ALIGNMENT
"""Numbers of a row. TensorFlow cuts whole rows of 64 bytes off a tensor without copying them."""


class FlatGradients:
    """All gradients as float32[rows, 16]: each begins on a row of its own, last layers first; the last row is for sums
    that travel along, such as the loss.

    Args:
        variables: those to train, in the order in which gradients are given and returned.
    """

    def __init__(self, variables: Sequence[keras.Variable]) -> None:
        self.shapes = [tuple(variable.shape) for variable in variables]
        self.layout = plan([math.prod(shape) for shape in self.shapes], None, SLOTS)

    def join(self, gradients: Sequence[tf.Tensor], slots: Mapping[int, tf.Tensor]) -> tf.Tensor:
        """Copies gradients, in the order of the variables, and the slots that are given into one tensor."""
        rows: list[tf.Tensor] = []
        for gradient, size in zip(reversed(gradients), reversed(self.layout.sizes), strict=True):
            # TensorFlow does not know every gradient's shape in advance, such as that of Dense over three axes.
            rows += [tf.reshape(tf.cast(gradient, tf.float32), (size,)), tf.zeros(-size % ROW)]
        last = [tf.cast(slots.get(slot, 0.0), tf.float32) for slot in range(SLOTS)]
        return tf.reshape(tf.concat([*rows, tf.stack(last)], 0), (-1, ROW))

    def pack(self, gradients: Sequence[tf.Tensor], loss: tf.Tensor) -> tf.Tensor:
        """Gradients and a scalar loss as one tensor, to be summed over the ranks.

        Args:
            gradients: in the order of the variables, each of its variable's shape.
            loss: this rank's part of the mean loss over all ranks' samples.

        Returns:
            float32[rows, 16].
        """
        return self.join(gradients, {LOSS: loss})

    def mean_loss(self, flat: tf.Tensor) -> float:
        """The loss that was packed.

        Args:
            flat: float32[rows, 16], summed over the ranks.
        """
        return float(flat[-1, LOSS])

    def split(self, flat: tf.Tensor) -> list[tf.Tensor]:
        """The float32 gradients in such a tensor, in the variables' order; no copies of those that fill their rows."""
        sizes = self.layout.sizes
        *pieces, _ = tf.split(flat, [-(-size // ROW) for size in reversed(sizes)] + [SLOTS // ROW])
        return [
            tf.reshape(tf.reshape(piece, (-1,))[:size], shape)
            for piece, size, shape in zip(reversed(pieces), sizes, self.shapes, strict=True)
        ]

    def zeros(self) -> tf.Tensor:
        """What a rank contributes whose part of the batch is empty."""
        return tf.zeros((self.layout.length // ROW, ROW))
