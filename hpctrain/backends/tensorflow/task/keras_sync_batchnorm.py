"""BatchNormalization over the samples of all ranks. Layers keep their class; only training statistics change."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.layers import BatchNormalization

from hpctrain.backends.joint_statistics import JointStatistics
from hpctrain.backends.tensorflow.keras_reducer import broadcast, on_host
from hpctrain.comm.group import Group
from hpctrain.errors import UserError, kind_of
from hpctrain.system.array_types import Floats
from hpctrain.train.clock import StepClock


def joint_layers(model: keras.Model, everywhere: bool) -> list[BatchNormalization]:
    """Layers to normalise over the samples of all ranks: all of them, or those with ``synchronized=True``."""
    layers = [layer for layer in model._flatten_layers() if isinstance(layer, BatchNormalization)]
    return [layer for layer in layers if everywhere or layer.synchronized]


class KerasSyncBatchNorm(JointStatistics):
    """Makes layers normalise over the samples of all ranks in training.

    Exchanges are Python functions that TensorFlow calls, chained in the order of the trace: otherwise TensorFlow could
    run them in different orders on different ranks, which would deadlock.

    Args:
        layers: layers from ``joint_layers``.
        group: the ranks that see different samples; more than one.
        clock: records the time spent waiting.

    Raises:
        UserError: a layer overrides the computation of statistics.
    """

    def __init__(self, layers: Sequence[BatchNormalization], group: Group, clock: StepClock) -> None:
        self.own = BatchNormalization._moments
        for layer in layers:
            if type(layer)._moments is not self.own:
                raise UserError(
                    f"{layer.path} is {kind_of(layer)}, which computes statistics in its own way",
                    "use keras.layers.BatchNormalization itself, or train without train.sync_batchnorm",
                )
        self.layers = {id(layer) for layer in layers}
        self.variables = [variable.value for layer in layers for variable in layer.non_trainable_variables]
        """Moving statistics, equal on all ranks."""
        super().__init__(group, clock)
        self.graph: Any = None
        self.last: list[tf.Tensor] = []
        """The last exchange in the trace."""

    def follow(self) -> None:
        """Sets moving statistics to those of rank 0. Collective."""
        broadcast(self.everyone, self.variables, "follow BatchNorm's statistics")

    @contextlib.contextmanager
    def traced(self) -> Iterator[None]:
        """Context in which forward and backward pass of a micro-batch are traced."""

        def moments(layer: BatchNormalization, inputs: tf.Tensor, mask: tf.Tensor | None) -> Any:
            return self.moments(inputs, mask, layer) if id(layer) in self.layers else self.own(layer, inputs, mask)

        self.graph, self.last = tf.compat.v1.get_default_graph(), []
        BatchNormalization._moments = moments
        try:
            yield
        finally:
            BatchNormalization._moments = self.own

    def before(self, pieces: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Makes the exchange of gradient pieces wait for all exchanges of statistics."""
        with tf.control_dependencies(self.last):
            return [*pieces[:-1], tf.identity(pieces[-1])]

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def moments(self, inputs: tf.Tensor, mask: tf.Tensor | None, layer: BatchNormalization) -> Any:
        """Mean and biased variance of each channel over all ranks, without masked positions; differentiable."""
        axes = layer._reduction_axes
        channels = inputs.shape[layer.axis]
        shape = [1] * inputs.shape.rank
        shape[layer.axis] = channels
        if mask is None:
            weights = tf.ones_like(inputs)
        else:
            weights = tf.broadcast_to(tf.cast(tf.expand_dims(mask, -1), inputs.dtype), tf.shape(inputs))
        count = tf.cast(tf.reduce_sum(weights) / channels, tf.float64)

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def joint(values: tf.Tensor) -> tuple[Any, Callable[..., tf.Tensor]]:
            kept = tf.where(weights > 0, values, tf.zeros_like(values))
            mean = tf.reduce_sum(kept, axes) / tf.cast(tf.maximum(count, 1.0), values.dtype)
            squares = tf.reduce_sum(weights * (kept - tf.reshape(mean, shape)) ** 2, axes)
            found = self._joined(self._merge, [[count], mean, squares], 1 + 2 * channels, layer)
            total, mean, squares = tf.split(found, [1, channels, channels])
            total = tf.maximum(total, 1.0)
            mean, variance = tf.cast(mean, values.dtype), tf.cast(squares / total, values.dtype)

            def gradient(of_mean: tf.Tensor, of_variance: tf.Tensor) -> tf.Tensor:
                sums = self._joined(self.add, [of_mean, of_variance], 2 * channels, layer) / total
                sums = tf.reshape(tf.cast(sums, values.dtype), [2, *shape])
                return weights * (sums[0] + 2 * sums[1] * (kept - tf.reshape(mean, shape)))

            return (mean, variance), gradient

        return joint(inputs)

    def _joined(
        self, function: Callable[..., Any], parts: Sequence[Any], length: int, layer: BatchNormalization
    ) -> tf.Tensor:
        """Runs an exchange after all earlier ones; returns its float64 result."""
        if tf.compat.v1.get_default_graph() is not self.graph:
            raise UserError(
                f"{layer.path} is in a loop, a branch or a tf.function of the model, where ranks cannot communicate",
                "take the layer out of it, or train without train.sync_batchnorm",
            )
        message = tf.concat([tf.cast(part, tf.float64) for part in parts], 0)
        with tf.control_dependencies(self.last):
            found = on_host(function, [message], tf.float64)
        found.set_shape([length])
        self.last = [found]
        return found

    def _merge(self, message: Floats) -> Floats:
        mean, squares = np.split(message[1:], 2)
        found = self.merge(float(message[0]), mean, squares)
        return np.concatenate([[found.count], found.mean, found.squares])
