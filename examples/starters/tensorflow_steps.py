"""A small GAN with Keras that generates points on a ring: two networks, each with its own optimizer."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from hpctrain import KerasTask

NOISE = 4


def points(samples: int, seed: int) -> dict[str, np.ndarray[Any, Any]]:
    """Points at distance 1 from the origin, and noise to generate others from; replace them with your own."""
    random = np.random.default_rng(seed)
    angle = random.uniform(0, 2 * np.pi, samples)
    point = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    noise = random.normal(size=(samples, NOISE))
    return {"point": point.astype(np.float32), "noise": noise.astype(np.float32)}


class Ring(keras.Model):  # type: ignore[misc]
    """Two networks and their optimizers; ``train_step`` is called for each step, as in ``fit``."""

    def __init__(self, lr: float) -> None:
        super().__init__()
        self.maker, self.judge = network(NOISE, 2), network(2, 1)
        self.for_maker, self.for_judge = (keras.optimizers.Adam(lr, beta_1=0.5) for _ in range(2))

    def call(self, noise: Any) -> Any:
        """Generate points from noise."""
        return self.maker(noise)

    def train_step(self, data: Any) -> dict[str, Any]:
        """Update the judge, which tells real points from generated ones, then the maker."""
        point, noise = data
        with tf.GradientTape() as tape:
            real, false = self.judge(point), self.judge(self.maker(noise))
            judged = ops.mean(ops.softplus(-real)) + ops.mean(ops.softplus(false))
        weights = self.judge.trainable_variables
        self.for_judge.apply_gradients(zip(tape.gradient(judged, weights), weights, strict=True))
        with tf.GradientTape() as tape:
            made = ops.mean(ops.softplus(-self.judge(self.maker(noise))))
        weights = self.maker.trainable_variables
        self.for_maker.apply_gradients(zip(tape.gradient(made, weights), weights, strict=True))
        return {"judge": judged, "loss": made}

    def test_step(self, data: Any) -> dict[str, Any]:
        """Mean distance of generated points from the ring."""
        return {"error": ops.mean(ops.abs(ops.norm(self(data[1]), axis=1) - 1))}


def network(inputs: int, outputs: int) -> keras.Model:
    """A small network."""
    hidden = [layers.Dense(64, "relu"), layers.Dense(64, "relu")]
    return keras.Sequential([keras.Input((inputs,)), *hidden, layers.Dense(outputs)])


def task(lr: float = 3e-3) -> KerasTask:
    """Build the task; ``task_args`` in the run file sets the arguments."""
    return KerasTask(
        model=Ring(lr),
        fit_data=lambda batch: (batch["point"], batch["noise"]),
        train=points(10_000, seed=1),
        validation=points(400, seed=2),
    )
