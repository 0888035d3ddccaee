"""Overhead of a Keras step compared with a hand-written ``tf.function``, for a model so small that overhead dominates.

    pytest -s tests/bench/test_keras_loop_overhead.py

On two ranks the hand-written step sums a flat buffer by mpi4py's Allreduce in a ``numpy_function``.
"""

from __future__ import annotations

import re
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from numpy.typing import NDArray

from hpctrain.comm.world import World, connect
from hpctrain.reduce.candidates import Candidate
from hpctrain.reduce.reducer_choice import ReducerChoice
from tests.support.mpi import mpirun
from tests.tasks.tensorflow_tasks import GLOBAL_BATCH, cut, global_batches, make_framework, mean_loss, plain_model

ALLOWED_US = 30.0
NOISE = 0.03
"""Allowed share of a step of several ranks, which wait for each other."""
ROUNDS = 3000


def sgd() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(1e-2, momentum=0.9)


def by_hand(world: World, batch: dict[str, NDArray[Any]]) -> Callable[[], float]:
    """A step as in Keras' documentation, on a batch that is already in tensors."""
    model, optimizer, comm = plain_model(), sgd(), world.data.comm
    variables = model.trainable_variables
    optimizer.build(variables)

    def exchanged(flat: NDArray[Any]) -> NDArray[Any]:
        assert comm is not None
        total = np.empty_like(flat)
        comm.Allreduce(flat, total)
        return total

    @tf.function
    def update(tensors: dict[str, tf.Tensor]) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = mean_loss(model(tensors["x"], training=True), tensors)
        gradients = tape.gradient(loss, [variable.value for variable in variables])
        if comm is not None:
            flat = tf.numpy_function(
                exchanged, [tf.concat([tf.reshape(one, [-1]) for one in gradients], 0)], tf.float32
            )
            flat.set_shape([sum(np.prod(variable.shape) for variable in variables)])
            parts = tf.split(flat / world.size, [int(np.prod(variable.shape)) for variable in variables])
            gradients = [tf.reshape(part, variable.shape) for part, variable in zip(parts, variables, strict=True)]
        optimizer.apply(gradients, variables)
        return loss

    tensors = {name: tf.constant(array) for name, array in batch.items()}
    return lambda: float(update(tensors))


def ours(world: World, batch: dict[str, NDArray[Any]], way: str) -> Callable[[], object]:
    """The framework's step, on NumPy arrays."""
    kept = None if world.size == 1 else Candidate.parse(way).name
    framework = make_framework(world, optimizer=sgd, choice=lambda config, ranks: ReducerChoice(config, ranks, kept))

    def step() -> object:
        framework.set_learning_rate(0.5)
        return framework.step([batch], GLOBAL_BATCH)

    return step


def seconds_of(step: Callable[[], object]) -> float:
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def more_than_by_hand(world: World, way: str, rounds: int = ROUNDS) -> tuple[float, float]:
    """Median seconds of a hand-written step, and median extra seconds of ours, measured in pairs."""
    (batch,) = cut(next(global_batches(1)), world.rank, world.size)
    first, second = by_hand(world, batch), ours(world, batch, way)
    pairs = [(seconds_of(first), seconds_of(second)) for _ in range(rounds)][rounds // 10 :]
    return statistics.median(one for one, _ in pairs), statistics.median(other - one for one, other in pairs)


@pytest.mark.parametrize(("ranks", "way"), [(1, "none"), (2, "mpi-flat"), (2, "mpi-node")])
def test_a_step_costs_less_than_30_us_more_than_by_hand(ranks, way):
    found = mpirun(ranks, "tests.bench.test_keras_loop_overhead", way).stdout
    print(found)
    hand_us, more_us = (float(word) for word in re.findall(r"(-?[\d.]+) us", found))
    assert more_us < max(ALLOWED_US, NOISE * hand_us * (ranks > 1))


def main() -> None:
    """Measure on all ranks; rank 0 prints the result."""
    world = connect()
    hand_s, more_s = more_than_by_hand(world, sys.argv[1])
    if world.rank == 0:
        print(f"{sys.argv[1]}: by hand {hand_s * 1e6:.1f} us, ours {more_s * 1e6:.1f} us more", flush=True)


if __name__ == "__main__":
    main()
