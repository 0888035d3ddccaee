"""The training of tensorflow_training.py, hand-written for one process without hpctrain; prints the losses."""

from __future__ import annotations

import json

import keras
import numpy as np
import tensorflow as tf
from keras import layers


def main() -> None:
    """Run Adam over 50 batches of 30 samples; the last batch of each epoch is smaller."""
    random = np.random.default_rng(5)
    x = random.normal(size=(183, 12)).astype(np.float32)
    y = x[:, :3].argmax(1)
    keras.utils.set_random_seed(7)
    model = keras.Sequential(
        [keras.Input((12,)), layers.Dense(31, activation="tanh"), layers.Dense(16, activation="relu"), layers.Dense(3)]
    )
    optimizer = keras.optimizers.Adam(1e-2)
    losses = []
    for step in range(50):
        begin = (step % 7) * 30
        with tf.GradientTape() as tape:
            each = tf.nn.sparse_softmax_cross_entropy_with_logits(y[begin : begin + 30], model(x[begin : begin + 30]))
            loss = tf.reduce_mean(each)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        losses.append(float(loss))
    print(json.dumps(losses))


if __name__ == "__main__":
    main()
