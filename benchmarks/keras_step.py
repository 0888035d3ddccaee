"""Further Keras models for ``benchmarks.step``, and contenders without hpctrain."""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from hpctrain.backends.tensorflow import keras_bench_models
from hpctrain.backends.tensorflow.keras_bench_models import KerasBenchProblem, batch_of, cross_entropy, seeded
from hpctrain.comm.world import World

ROWS = 500_000
"""Rows of the embedding table."""


def lstm() -> keras.Model:
    """LSTM with two layers of 256 over 32 steps; 0.9 M parameters."""
    return keras.Sequential(
        [keras.Input((32, 64)), layers.LSTM(256, return_sequences=True), layers.LSTM(256), layers.Dense(10)]
    )


def small() -> keras.Model:
    """100 layers of width 32; 0.1 M parameters in 204 tensors."""
    inputs = keras.Input((32,))
    hidden = inputs
    for _ in range(100):
        hidden = layers.Dense(32, activation="tanh")(hidden)
    return keras.Model(inputs, layers.Dense(10)(hidden))


def wide() -> keras.Model:
    """MLP 256-4096-4096-10; 17.9 M parameters."""
    return keras.Sequential(
        [
            keras.Input((256,)),
            layers.Dense(4096, activation="relu"),
            layers.Dense(4096, activation="relu"),
            layers.Dense(10),
        ]
    )


def tables() -> keras.Model:
    """An embedding table of 500,000 x 16, eight rows per sample, and two layers."""
    return keras.Sequential(
        [
            keras.Input((8,), dtype="int64"),
            layers.Embedding(ROWS, 16),
            layers.GlobalAveragePooling1D(),
            layers.Dense(64, activation="relu"),
            layers.Dense(10),
        ]
    )


MODELS: dict[str, tuple[Callable[[], keras.Model], tuple[int, ...]]] = {
    **keras_bench_models.MODELS,
    "lstm": (lstm, (32, 32, 64)),
    "small": (small, (64, 32)),
    "wide": (wide, (64, 256)),
}
TABLES: dict[str, Callable[[], keras.optimizers.Optimizer]] = {
    "tables-sgd": lambda: keras.optimizers.SGD(1e-3),
    "tables-adagrad": lambda: keras.optimizers.Adagrad(1e-3),
    "tables-adam": lambda: keras.optimizers.Adam(1e-3),
}
"""Optimizers of the large table; the other models have SGD with momentum."""


def problem(name: str, world: World, dense: bool = False) -> KerasBenchProblem:
    """Makes a model of MODELS or TABLES; ``dense`` is not needed, since Keras' optimizers accept dense gradients."""
    if name in TABLES:
        ids = np.random.default_rng(1 + world.rank).integers(0, ROWS, (512, 8))
        return KerasBenchProblem(seeded(tables), TABLES[name](), {**batch_of((512,), world), "input": ids})
    make, shape = MODELS[name]
    return KerasBenchProblem(seeded(make), keras.optimizers.SGD(1e-3, momentum=0.9), batch_of(shape, world))


class Plain:
    """A step in one function, as in Keras' documentation, with another library's exchange."""

    def __init__(
        self,
        problem: KerasBenchProblem,
        tape_of: Callable[[tf.GradientTape], Any] = lambda tape: tape,
        run: Callable[..., Any] = lambda function, *args: function(*args),
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self.model = problem.model
        batch = {name: tf.constant(value) for name, value in problem.batch.items()}
        variables = problem.model.trainable_variables
        problem.optimizer.build(variables)

        def update(batch: Any) -> tf.Tensor:
            with tf.GradientTape() as recorded:
                loss = cross_entropy(problem.model(batch["input"], training=True), batch)
            tape = tape_of(recorded)
            problem.optimizer.apply(tape.gradient(loss, [variable.value for variable in variables]), variables)
            return loss

        self.function = tf.function(lambda: run(update, batch))
        self.close = close

    def step(self) -> None:
        self.function()

    def weights_hash(self) -> str:
        return hashlib.sha256(b"".join(np.asarray(v).tobytes() for v in self.model.trainable_variables)).hexdigest()


def plain_horovod(problem: KerasBenchProblem) -> Plain:
    """Horovod's DistributedGradientTape with default settings."""
    import horovod.tensorflow as hvd

    hvd.init()

    return Plain(problem, tape_of=hvd.DistributedGradientTape, close=hvd.shutdown)


def workers(world: World) -> tf.distribute.Strategy:
    """TensorFlow's MultiWorkerMirroredStrategy over the ranks; make it before any other use of TensorFlow."""
    free = socket.create_server(("127.0.0.1", 0))
    ports = world.everyone.allgather(free.getsockname()[1], "find the workers")
    free.close()
    cluster = {"worker": [f"127.0.0.1:{port}" for port in ports]}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": world.rank}})
    return tf.distribute.MultiWorkerMirroredStrategy()


def mirrored(strategy: Any, model: str, world: World) -> Plain:
    """The plain step under a strategy: Keras' optimizers sum gradients over its replicas."""
    with strategy.scope():
        return Plain(problem(model, world), run=lambda function, *args: strategy.run(function, args=args))


def others(names: Sequence[str], world: World) -> dict[str, Callable[[str], Plain]]:
    """Contenders by name, made from a model's name. Collective."""
    strategy = workers(world) if "mwms" in names else None
    return {
        "plain": lambda model: Plain(problem(model, world)),
        "horovod-plain": lambda model: plain_horovod(problem(model, world)),
        "mwms": lambda model: mirrored(strategy, model, world),
    }
