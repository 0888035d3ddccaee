"""The task of the run folder ``keras`` beside this file."""

import keras
import numpy as np
import tensorflow as tf

from hpctrain import KerasTask


def task() -> KerasTask:
    x = np.linspace(-3, 3, 64, dtype=np.float32)[:, None]
    layers = [keras.layers.Dense(6), keras.layers.BatchNormalization(), keras.layers.Activation("tanh")]
    return KerasTask(
        model=keras.Sequential([keras.Input((1,)), *layers, keras.layers.Dense(1)]),
        loss=lambda output, batch: tf.reduce_mean(tf.square(output - batch["y"])),
        optimizer=keras.optimizers.Adam(0.01),
        train={"x": x, "y": np.sin(x)},
    )
