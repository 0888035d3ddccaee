"""Small Keras models, losses and data for tests, and a framework around them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from hpctrain.backends.tensorflow.keras_framework import KerasFramework
from hpctrain.backends.tensorflow.runtime import begin_task
from hpctrain.backends.tensorflow.task.keras_opening import open_keras
from hpctrain.comm.world import World
from hpctrain.config.sections import Config, ParallelConfig, ReduceConfig, TrainConfig
from hpctrain.reduce.reducer_choice import ReducerChoice
from hpctrain.tasks.definition import KerasTask
from hpctrain.train.clock import IntervalClock
from tests.tasks import points
from tests.tasks.points import GLOBAL_BATCH, Batch, cut


def samples() -> Batch:
    """Fixed samples, without words."""
    return {name: array for name, array in points.samples().items() if name != "words"}


def global_batches(count: int) -> Iterator[Batch]:
    """Global batches of these samples."""
    return points.in_batches(samples(), count)


def plain_model() -> keras.Model:
    """A model in which nothing depends on the rank."""
    return keras.Sequential(
        [keras.Input((12,)), layers.Dense(31, activation="tanh"), layers.Dense(16, activation="relu"), layers.Dense(3)]
    )


def wide_model() -> keras.Model:
    """A model with more weights than are exchanged as one piece."""
    return keras.Sequential([keras.Input((12,)), layers.Dense(2048, activation="tanh"), layers.Dense(3)])


def noisy_model() -> keras.Model:
    """A model with dropout and BatchNorm."""
    return keras.Sequential(
        [keras.Input((12,)), layers.Dense(32), layers.BatchNormalization(), layers.Dropout(0.2), layers.Dense(3)]
    )


def normalised_model() -> keras.Model:
    """A float64 model with several kinds of BatchNormalization, in branches that TensorFlow may run in any order."""
    points = keras.Input((12,), dtype="float64")
    hidden = layers.BatchNormalization(momentum=0.9)(layers.Dense(16)(points))
    left = layers.BatchNormalization(synchronized=True)(layers.Dense(8, activation="tanh")(hidden))
    right = layers.BatchNormalization(scale=False, center=False)(layers.Dense(8)(layers.ReLU()(hidden)))
    grid = layers.BatchNormalization(axis=1)(layers.Reshape((4, 2))(right))
    return keras.Model(points, layers.Dense(3)(layers.Concatenate()([left, layers.Flatten()(grid)])))


def embedding_model() -> keras.Model:
    """A model that looks up few of 40,000 embeddings, some of them often, by the values of the points."""
    points = keras.Input((12,))
    words = ops.cast(ops.abs(points) * 100, "int32") % 150 * 250
    means = layers.GlobalAveragePooling1D()(layers.Embedding(40_000, 8, embeddings_initializer="uniform")(words))
    return keras.Model(points, layers.Dense(3)(layers.Dense(8, activation="tanh")(means)))


def mean_loss(outputs: tf.Tensor, batch: Mapping[str, tf.Tensor]) -> tf.Tensor:
    """Mean cross-entropy."""
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(batch["y"], outputs))


def weighted_loss(outputs: tf.Tensor, batch: Mapping[str, tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
    """Weighted cross-entropy, as (sum, weight)."""
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(batch["y"], outputs)
    return tf.reduce_sum(losses * batch["w"]), tf.reduce_sum(batch["w"])


def accuracy(outputs: tf.Tensor, batch: Mapping[str, tf.Tensor]) -> tf.Tensor:
    """Fraction of correct predictions."""
    return tf.reduce_mean(tf.cast(tf.argmax(outputs, 1) == batch["y"], tf.float32))


def make_framework(
    world: World,
    model: Any = plain_model,
    loss: Any = mean_loss,
    optimizer: Any = lambda: keras.optimizers.Adam(1e-2),
    kind: str | None = None,
    reduce: Any = (),
    choice: Callable[[ReduceConfig, World], ReducerChoice] = ReducerChoice,
    metrics: Any = None,
    parallel: ParallelConfig = ParallelConfig(),  # noqa: B008  frozen
    state: Mapping[str, Any] | None = None,
    **train: Any,
) -> KerasFramework:
    """A framework around a new model, by default with Adam; ``train`` and ``reduce`` are more settings.

    The default ``kind`` measures nothing: to choose among reducers takes longer than most trainings of the tests.
    """
    if kind is None:
        kind = "mpi" if world.size > 1 and choice is ReducerChoice else "auto"
    begin_task(7, train.get("precision", "fp32"), world.local_rank)
    judges = metrics or {"accuracy": accuracy}
    task = KerasTask(model(), loss, optimizer(), None, metrics=judges, state=state or {})
    settings = TrainConfig(steps=1, global_batch=GLOBAL_BATCH, **train)
    config = Config(
        name="test",
        task="a:b",
        seed=7,
        train=settings,
        parallel=parallel,
        reduce=ReduceConfig(kind=kind, **dict(reduce)),  # type: ignore[arg-type]
    )
    return open_keras(task, world, config, IntervalClock(), choice(config.reduce, world))


def train(framework: KerasFramework, steps: int, accumulate: int = 1, skip: int = 0) -> list[float]:
    """Train, and return the mean loss of each global batch."""
    group = framework.group
    losses = []
    for batch in list(global_batches(skip + steps))[skip:]:
        framework.set_learning_rate(1.0)
        result = framework.step(cut(batch, group.rank, group.size, accumulate), len(batch["x"]))
        pairs = np.array(group.allgather(result.sums()["loss"], "report the loss"))
        losses.append(float(pairs[:, 0].sum() / pairs[:, 1].sum()))
    return losses
