"""Operations of Keras models are counted in their graphs, by hand beside it."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from hpctrain.comm.world import alone
from hpctrain.train.stateful import value_of
from tests.tasks.tensorflow_tasks import make_framework

SAMPLES = 5


def images() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((12, 12, 4)),
            layers.Conv2D(8, 3),
            layers.BatchNormalization(),
            layers.DepthwiseConv2D(3),
            layers.Conv2DTranspose(6, 3),
            layers.Flatten(),
            layers.Dense(5),
        ]
    )


def attention() -> keras.Model:
    words = keras.Input((7, 16))
    found = layers.Dropout(0.5)(layers.MultiHeadAttention(2, 8)(words, words))
    return keras.Model(words, layers.EinsumDense("abc,cd->abd", (7, 3))(found))


def volumes() -> keras.Model:
    return keras.Sequential([keras.Input((6, 6, 6, 2)), layers.Conv3D(4, 3), layers.Conv3DTranspose(3, 3)])


def recurrent() -> keras.Model:
    return keras.Sequential([keras.Input((6, 4)), layers.LSTM(5), layers.Dense(2)])


def grouped() -> keras.Model:
    return keras.Sequential([keras.Input((6, 6, 4)), layers.Conv2D(4, 3, groups=2), layers.Dense(2)])


def frozen() -> keras.Model:
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3), layers.Dense(2)])
    model.layers[0].trainable = False
    return model


def loss(outputs: Any, batch: Any) -> Any:
    return tf.reduce_mean(outputs**2)


def counted(model: Any, **train: Any) -> Any:
    framework = make_framework(alone(), model=model, loss=loss, metrics={"size": loss}, **train)
    shape = framework.task.model.input_shape[1:]
    framework.dry_call({"x": np.ones((SAMPLES, *shape), np.float32)})
    return framework


@pytest.mark.parametrize(
    ("model", "products"),
    [
        (
            images,
            10 * 10 * 8 * 9 * 4 + 8 * 8 * 8 * 9 + 8 * 8 * 8 * 9 * 6 + 10 * 10 * 6 * 5,
        ),
        (attention, 4 * 7 * 16 * 16 + 2 * (2 * 7 * 7 * 8) + 7 * 16 * 3),
        (volumes, 4**3 * 4 * 27 * 2 + 4**3 * 4 * 27 * 3),
    ],
)
def test_training_takes_three_forward_passes(model, products):
    found = counted(model).flops
    assert found.per_sample == 3 * 2 * products
    assert 1e8 < found.peak_per_s < 1e14


@pytest.mark.parametrize("model", [recurrent, grouped, frozen])
def test_what_cannot_be_counted_is_left_out(model):
    assert counted(model).flops is None


def test_counting_changes_neither_weights_nor_random_numbers():
    framework = counted(attention)
    fresh = make_framework(alone(), model=attention, loss=loss, metrics={"size": loss})
    found, wanted = ({one.name: one for one in each.state()} for each in (framework, fresh))
    assert found.keys() == wanted.keys()
    for name, one in found.items():
        np.testing.assert_array_equal(value_of(one), value_of(wanted[name]), err_msg=name)
