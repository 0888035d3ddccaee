"""Trains Keras models one after the other and compares them with one process; see tests/support/sweep.py."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from hpctrain.backends.keras.keras_model import lacks_weights
from hpctrain.backends.tensorflow.runtime import begin_task
from hpctrain.backends.tensorflow.state.weights import build_weights
from hpctrain.backends.tensorflow.task.keras_opening import open_keras
from hpctrain.comm.world import World, connect
from hpctrain.config.sections import Config, ReduceConfig, TrainConfig
from hpctrain.reduce.reducer_choice import ReducerChoice
from hpctrain.tasks.definition import KerasTask
from hpctrain.train.clock import IntervalClock
from tests.support.sweep import Weights, batches, micro_batches, sweep
from tests.tasks.tensorflow_layers import CASES, with_weights
from tests.tasks.tensorflow_problems import Problem, everything

NO_OVERFLOW = 2.0**8
"""Loss scale at which fp16 skips no update: runs with skipped updates could not be compared."""


def task_of(problem: Problem) -> KerasTask:
    """A new task, with the same weights each time."""
    begin_task(7, problem.train.get("precision", "fp32"))
    task = KerasTask(problem.model(), problem.loss, problem.optimizer(), None, forward=problem.forward)
    if lacks_weights(task.model):
        build_weights(task, problem.fields)
    return task


def weights(task: KerasTask) -> Weights:
    """All trainable variables."""
    return [variable.numpy().astype(np.float64) for variable in task.model.trainable_variables]


def on_ranks(problem: Problem, world: World) -> tuple[Weights, Weights]:
    """Weights before and after the updates on all ranks."""
    task = task_of(problem)
    train = TrainConfig(steps=1, global_batch=1, **problem.train)
    kind: Any = "mpi" if world.size > 1 else "none"
    config = Config(name="sweep", task="a:b", train=train, reduce=ReduceConfig(kind=kind))
    framework = open_keras(task, world, config, IntervalClock(), ReducerChoice(config.reduce, world))
    if framework.source.loss_scale:
        framework.source.loss_scale.state[0] = NO_OVERFLOW
    before = weights(task)
    for batch in batches(problem.fields):
        framework.step(micro_batches(batch, world.data, train.accumulate), len(batch["x"]))
    framework.close()
    return before, weights(task)


def exact(problem: Problem) -> Weights:
    """The result of a hand-written loop on whole batches."""
    task = task_of(problem)
    variables = task.model.trainable_variables
    values = [variable.value for variable in variables]
    for batch in batches(problem.fields):
        with tf.GradientTape() as tape:
            loss = task.loss(task.forward(partial(task.model, training=True), batch), batch)
            loss = loss[0] / loss[1] if isinstance(loss, tuple) else loss
            loss = loss + sum(tf.cast(penalty, loss.dtype) for penalty in task.model.losses)
        gradients = tape.gradient(loss, values, unconnected_gradients="zero")
        task.optimizer.apply([tf.convert_to_tensor(gradient) for gradient in gradients], variables)
    return weights(task)


def main() -> None:
    """Run the sweep; rank 0 prints."""
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})  # takes a third, for a few runs each
    world = connect()
    missing = with_weights() - {name.split()[0] for name in CASES}
    sweep(everything(), world.data, lambda problem: on_ranks(problem, world), exact, missing)


if __name__ == "__main__":
    main()
