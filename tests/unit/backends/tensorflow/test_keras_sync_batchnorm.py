"""BatchNormalization that meets other ranks computes what Keras' own does, on one rank."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from hpctrain.backends.joint_statistics import BatchNorms
from hpctrain.backends.tensorflow.task.keras_sync_batchnorm import KerasSyncBatchNorm, joint_layers
from hpctrain.comm.group import Group
from hpctrain.comm.world import alone
from hpctrain.errors import UserError
from hpctrain.train.clock import IntervalClock
from tests.tasks.tensorflow_tasks import make_framework

VALUES = np.random.default_rng(1).normal(3.0, 2.0, (4, 5, 6))
MASK = np.arange(20).reshape(4, 5) % 3 > 0


def passes(layer: layers.BatchNormalization, mask: Any, joint: KerasSyncBatchNorm | None) -> list[np.ndarray[Any, Any]]:
    """Outputs, gradients and moving statistics of one traced pass."""

    @tf.function(autograph=False)
    def run(values: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(values)
            outputs = layer(values, training=True, mask=mask)
            target = tf.reduce_sum(outputs * tf.reshape(tf.range(120, dtype=values.dtype), values.shape))
        return [outputs, *tape.gradient(target, [values, *(one.value for one in layer.trainable_variables)])]

    if joint is None:
        found = run(tf.constant(VALUES))
    else:
        joint.begin_update(1)
        joint.begin_micro_batch(0)
        found = traced(run, joint)
    return [np.asarray(one) for one in (*found, *layer.non_trainable_variables)]


def traced(run: Any, joint: KerasSyncBatchNorm) -> Any:
    """The pass inside a function that is traced, as an update is."""

    @tf.function(autograph=False)
    def outer(values: tf.Tensor) -> Any:
        with joint.traced():
            return run.python_function(values)

    return outer(tf.constant(VALUES))


LAST_AXIS: list[dict[str, Any]] = [{}, {"scale": False, "center": False}, {"synchronized": True}]


def make(**settings: Any) -> layers.BatchNormalization:
    """A layer in float64."""
    layer = layers.BatchNormalization(dtype="float64", **settings)
    layer.build(VALUES.shape)
    return layer


@pytest.mark.parametrize(
    ("settings", "masked"),
    [
        *((settings, masked) for settings in LAST_AXIS for masked in (False, True)),
        ({"axis": 1}, False),  # Keras' own masks are for channels in the last axis
    ],
)
def test_every_kind_of_layer_computes_what_keras_does(settings, masked):
    mask = tf.constant(MASK) if masked else None
    own, other = make(**settings), make(**settings)
    joint = KerasSyncBatchNorm([other], Group("alone"), IntervalClock())
    for one, two in zip(passes(other, mask, joint), passes(own, mask, None), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-5)  # Keras adds 1e-7 to the count of a mask
    assert joint.meetings == 2
    assert layers.BatchNormalization._moments is joint.own
    joint.close()


def test_layers_say_what_they_want():
    model = keras.Sequential([keras.Input((3,)), make_flat(), make_flat(synchronized=True)])
    assert joint_layers(model, False) == model.layers[1:]
    assert joint_layers(model, True) == model.layers


def make_flat(**settings: Any) -> layers.BatchNormalization:
    """A layer for rows."""
    return layers.BatchNormalization(**settings)


def test_statistics_of_ones_own_are_refused():
    class Own(layers.BatchNormalization):
        def _moments(self, inputs, mask):
            return super()._moments(inputs, mask)

    with pytest.raises(UserError, match="is an Own, which computes statistics in its own way"):
        KerasSyncBatchNorm([Own()], Group("alone"), IntervalClock())


def test_a_layer_in_a_loop_is_refused():
    layer = layers.BatchNormalization()
    layer.build((2, 3))
    joint = KerasSyncBatchNorm([layer], Group("alone"), IntervalClock())

    @tf.function(autograph=False)
    def run(values):
        with joint.traced():
            return tf.while_loop(lambda i, x: i < 2, lambda i, x: (i + 1, layer(x, training=True)), (0, values))

    with pytest.raises(RuntimeError, match="is in a loop, a branch or a tf") as error:
        run(tf.ones((2, 3)))
    assert isinstance(error.value.__context__, UserError), "which is what a user sees"


def test_one_process_needs_no_meeting():
    model = lambda: keras.Sequential([keras.Input((12,)), make_flat(synchronized=True), layers.Dense(3)])  # noqa: E731
    framework = make_framework(alone(), model, kind="none", sync_batchnorm=True)
    result = framework.step([{"x": np.ones((4, 12), np.float32), "y": np.zeros(4, np.int64)}], 4)
    assert np.isfinite(result.sums()["loss"]).all() and type(framework.program.batch_norms) is BatchNorms
    framework.close()
