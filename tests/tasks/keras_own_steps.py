"""Keras models in published form, with their own ``train_step``, and tasks around them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from hpctrain.backends.keras.keras_compiled import adopted
from hpctrain.backends.keras.keras_model import lacks_weights
from hpctrain.backends.tensorflow.keras_framework import KerasFramework
from hpctrain.backends.tensorflow.runtime import begin_task
from hpctrain.backends.tensorflow.state.weights import build_weights
from hpctrain.backends.tensorflow.task.keras_opening import open_keras
from hpctrain.comm.world import World
from hpctrain.config.sections import Config, ReduceConfig, TrainConfig
from hpctrain.data.order import part_of
from hpctrain.reduce.reducer_choice import ReducerChoice
from hpctrain.tasks.definition import KerasTask
from hpctrain.train.clock import IntervalClock

SAMPLES = 183


def pictures(samples: int = SAMPLES) -> np.ndarray:
    """Fixed images of blobs: float32[samples, 8, 8, 1] between 0 and 1."""
    random = np.random.default_rng(2)
    centre, grid = random.uniform(1, 6, (samples, 2, 1, 1)), np.mgrid[0:8, 0:8]
    return np.exp(-((grid - centre) ** 2).sum(1) / 4)[..., None].astype(np.float32)


class Sampling(layers.Layer):
    """Uses (z_mean, z_log_var) to sample z, the vector encoding a picture."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.seed_generator = keras.random.SeedGenerator(1337)

    def call(self, inputs: Any) -> Any:
        """Sample z."""
        z_mean, z_log_var = inputs
        batch, dim = ops.shape(z_mean)[0], ops.shape(z_mean)[1]
        epsilon = keras.random.normal(shape=(batch, dim), dtype=z_mean.dtype, seed=self.seed_generator)
        return z_mean + ops.exp(0.5 * z_log_var) * epsilon


class VAE(keras.Model):
    """A variational autoencoder, as in the Keras examples."""

    def __init__(self, encoder: keras.Model, decoder: keras.Model, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.encoder = encoder
        self.decoder = decoder
        self.total_loss_tracker = keras.metrics.Mean(name="loss")
        self.reconstruction_loss_tracker = keras.metrics.Mean(name="reconstruction_loss")
        self.kl_loss_tracker = keras.metrics.Mean(name="kl_loss")

    @property
    def metrics(self) -> list[Any]:
        """Metrics that Keras resets."""
        return [self.total_loss_tracker, self.reconstruction_loss_tracker, self.kl_loss_tracker]

    def losses_of(self, data: Any) -> tuple[Any, Any]:
        """Reconstruction loss and KL divergence."""
        z_mean, z_log_var, z = self.encoder(data)
        reconstruction = self.decoder(z)
        each = ops.sum(keras.losses.binary_crossentropy(data, reconstruction), axis=(1, 2))
        kl_loss = -0.5 * (1 + z_log_var - ops.square(z_mean) - ops.exp(z_log_var))
        return ops.mean(each), ops.mean(ops.sum(kl_loss, axis=1))

    def train_step(self, data: Any) -> dict[str, Any]:
        """Take one step."""
        with tf.GradientTape() as tape:
            reconstruction_loss, kl_loss = self.losses_of(data)
            total_loss = reconstruction_loss + kl_loss
        grads = tape.gradient(total_loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(grads, self.trainable_weights, strict=True))
        self.total_loss_tracker.update_state(total_loss)
        self.reconstruction_loss_tracker.update_state(reconstruction_loss)
        self.kl_loss_tracker.update_state(kl_loss)
        return {m.name: m.result() for m in self.metrics}


class TestedVAE(VAE):
    """A VAE with its own ``test_step``."""

    def test_step(self, data: Any) -> dict[str, Any]:
        """Return the same losses as for training."""
        reconstruction_loss, kl_loss = self.losses_of(data)
        return {"loss": reconstruction_loss + kl_loss, "kl_loss": kl_loss}


def vae(kind: type[VAE] = VAE, optimizer: Any = None) -> VAE:
    """A compiled VAE."""
    inputs = keras.Input((8, 8, 1))
    hidden = layers.Dense(24, activation="relu")(layers.Flatten()(inputs))
    z_mean, z_log_var = layers.Dense(2, name="z_mean")(hidden), layers.Dense(2, name="z_log_var")(hidden)
    encoder = keras.Model(inputs, [z_mean, z_log_var, Sampling()([z_mean, z_log_var])], name="encoder")
    latent = keras.Input((2,))
    outputs = layers.Reshape((8, 8, 1))(layers.Dense(64, activation="sigmoid")(layers.Dense(24, "relu")(latent)))
    model = kind(encoder, keras.Model(latent, outputs, name="decoder"))
    model.compile(optimizer=optimizer or keras.optimizers.Adam(1e-2))
    return model


class GAN(keras.Model):
    """Two networks and two optimizers, as in the Keras examples, except that noise is part of the samples."""

    def __init__(self, discriminator: keras.Model, generator: keras.Model) -> None:
        super().__init__()
        self.discriminator = discriminator
        self.generator = generator

    def compile(self, d_optimizer: Any, g_optimizer: Any, loss_fn: Any) -> None:
        """Set both optimizers and the loss."""
        super().compile()
        self.d_optimizer = d_optimizer
        self.g_optimizer = g_optimizer
        self.loss_fn = loss_fn
        self.d_loss_metric = keras.metrics.Mean(name="d_loss")
        self.g_loss_metric = keras.metrics.Mean(name="g_loss")

    @property
    def metrics(self) -> list[Any]:
        """Metrics that Keras resets."""
        return [self.d_loss_metric, self.g_loss_metric]

    def train_step(self, data: Any) -> dict[str, Any]:
        """Update the discriminator, then the generator against the updated discriminator."""
        real_images, noise = data
        batch_size = ops.shape(real_images)[0]
        combined_images = ops.concatenate([self.generator(noise), real_images], axis=0)
        labels = ops.concatenate([ops.ones((batch_size, 1)), ops.zeros((batch_size, 1))], axis=0)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(combined_images))
        grads = tape.gradient(d_loss, self.discriminator.trainable_weights)
        self.d_optimizer.apply_gradients(zip(grads, self.discriminator.trainable_weights, strict=True))
        misleading_labels = ops.zeros((batch_size, 1))
        with tf.GradientTape() as tape:
            g_loss = self.loss_fn(misleading_labels, self.discriminator(self.generator(noise)))
        grads = tape.gradient(g_loss, self.generator.trainable_weights)
        self.g_optimizer.apply(grads, self.generator.trainable_weights)
        self.d_loss_metric.update_state(d_loss)
        self.g_loss_metric.update_state(g_loss)
        return {"d_loss": self.d_loss_metric.result(), "g_loss": self.g_loss_metric.result()}


def gan(d_optimizer: Any = None, g_optimizer: Any = None) -> GAN:
    """A compiled GAN."""
    discriminator = keras.Sequential(
        [keras.Input((8, 8, 1)), layers.Flatten(), layers.Dense(24, "leaky_relu"), layers.Dense(1)]
    )
    generator = keras.Sequential(
        [keras.Input((4,)), layers.Dense(24, "relu"), layers.Dense(64), layers.Reshape((8, 8, 1))]
    )
    model = GAN(discriminator, generator)
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    d_optimizer = d_optimizer or keras.optimizers.Adam(1e-2)
    model.compile(d_optimizer, g_optimizer or keras.optimizers.SGD(0.05, momentum=0.9), loss)
    return model


def gan_data() -> dict[str, np.ndarray]:
    """Images and noise."""
    noise = np.random.default_rng(3).normal(size=(SAMPLES, 4)).astype(np.float32)
    return {"picture": pictures(), "noise": noise}


def vae_task(optimizer: Any = None) -> KerasTask:
    """The VAE, which samples differently on each rank."""
    data = {"picture": pictures(), "id": np.arange(SAMPLES)}
    fit_data = operator.itemgetter("picture")
    return KerasTask(vae(TestedVAE, optimizer), train=data, validation={"picture": pictures(40)}, fit_data=fit_data)


def gan_task(**optimizers: Any) -> KerasTask:
    """The GAN, without rank-dependent noise."""
    return KerasTask(model=gan(**optimizers), train=gan_data())


class Late(keras.Model):
    """A model that builds its layers in its first step and keeps optimizers in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.norm, self.head = layers.Dense(8), layers.BatchNormalization(), layers.Dense(1)
        self.optimizers = [keras.optimizers.SGD(0.05, momentum=0.9)]

    def call(self, x: Any, training: bool = False) -> Any:
        """One number per sample."""
        return self.head(self.norm(self.hidden(x), training=training))

    def train_step(self, data: Any) -> Any:
        """Take one step."""
        x, y = data
        with tf.GradientTape() as tape:
            loss = ops.mean((self(x, training=True)[:, 0] - y) ** 2)
        self.update(loss, tape)
        return {"loss": loss}

    def update(self, loss: Any, tape: tf.GradientTape) -> None:
        """Apply the gradients; subclasses override this."""
        self.optimizers[0].apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)


def numbers(samples: int = 183) -> dict[str, np.ndarray]:
    """Random points, and the sums of their coordinates."""
    x = np.random.default_rng(4).normal(size=(samples, 4)).astype(np.float32)
    return {"x": x, "y": x.sum(1)}


class Halves(Late):
    """A model that updates its layers one after the other, in either order."""

    def __init__(self, flip: bool = False) -> None:
        super().__init__()
        self.optimizers.append(keras.optimizers.SGD(0.1))
        self.flip = flip

    def update(self, loss: Any, tape: tf.GradientTape) -> None:
        """Apply two optimizers in turn."""
        parts = [self.hidden.trainable_weights, self.head.trainable_weights]
        first, second = tape.gradient(loss, parts)
        updates = [(self.optimizers[0], first, parts[0]), (self.optimizers[1], second, parts[1])]
        for optimizer, gradients, weights in reversed(updates) if self.flip else updates:
            optimizer.apply(gradients, weights)


class Lookup(keras.Model):
    """A large table that SGD updates by rows, followed by layers that another optimizer updates."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.hidden, self.head = layers.Embedding(40_000, 8), layers.Dense(8, "tanh"), layers.Dense(1)
        self.table_optimizer = keras.optimizers.SGD(0.5)

    def call(self, ids: Any) -> Any:
        """One number per sample."""
        return self.head(self.hidden(ops.mean(self.table(ids), axis=1)))

    def train_step(self, data: Any) -> Any:
        """Update the table with its own optimizer, then the layers and the table again with the other."""
        ids, y = data
        with tf.GradientTape(persistent=True) as tape:
            loss = ops.mean((self(ids)[:, 0] - y) ** 2)
        table, others = self.table.trainable_weights, self.hidden.trainable_weights + self.head.trainable_weights
        self.table_optimizer.apply(tape.gradient(loss, table), table)
        self.optimizer.apply(tape.gradient(loss, [*others, *table]), [*others, *table])
        return {"loss": loss}


def lookup_task() -> KerasTask:
    """The lookup model, with ids repeated within and across samples."""
    random = np.random.default_rng(6)
    ids = random.integers(0, 99, (SAMPLES, 5)).astype(np.int32) * 400
    model = Lookup()
    model.compile(optimizer=keras.optimizers.SGD(0.1, momentum=0.9))
    return KerasTask(model=model, train={"ids": ids, "y": random.normal(size=SAMPLES).astype(np.float32)})


def framework_of(make: Callable[[], KerasTask], world: World, kind: Any = "auto", **train: Any) -> KerasFramework:
    """A framework around a task, made as in a run."""
    begin_task(7, train.get("precision", "fp32"), world.local_rank)
    task = make()
    task = adopted(task, tuple(task.train))
    if lacks_weights(task.model):
        build_weights(task, {name: array[:1] for name, array in task.train.items()})
    settings = TrainConfig(steps=1, global_batch=30, **train)
    config = Config(name="test", task="a:b", seed=7, train=settings, reduce=ReduceConfig(kind=kind))
    return open_keras(task, world, config, IntervalClock(), ReducerChoice(config.reduce, world))


def global_batches(task: KerasTask, count: int) -> list[dict[str, np.ndarray]]:
    """Global batches in order; the last one of an epoch has 3 samples, so that the last of 4 ranks gets none."""
    begins = [(step * 30) % 210 for step in range(count)]
    return [{name: array[begin : begin + 30] for name, array in task.train.items()} for begin in begins]


def train(framework: KerasFramework, steps: int, skip: int = 0) -> list[dict[str, tuple[float, float]]]:
    """Train, and return this rank's sums of each step."""
    group, found = framework.group, []
    for batch in global_batches(framework.task, skip + steps)[skip:]:
        samples = len(next(iter(batch.values())))
        part = part_of(samples, group.rank, group.size)
        mine = [{name: array[part] for name, array in batch.items()}] if part.stop > part.start else []
        framework.set_learning_rate(1.0)
        found.append(framework.step(mine, samples).sums())
    return found
