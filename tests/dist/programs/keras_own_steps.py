"""Trains Keras models with their own ``train_step``, compares with plain Keras in one process, and prints JSON."""

from __future__ import annotations

import json
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hpctrain.backends.keras.keras_compiled import adopted
from hpctrain.backends.tensorflow.runtime import begin_task
from hpctrain.backends.tensorflow.state.weights import build_weights
from hpctrain.backends.tensorflow.steps.keras_own_step import TrainStepProgram
from hpctrain.comm.world import World, connect
from hpctrain.errors import UserError
from hpctrain.tasks.definition import KerasTask
from hpctrain.train.framework import NonFiniteLoss
from tests.support.attempts import furthest
from tests.tasks.keras_own_steps import (
    Halves,
    framework_of,
    gan,
    gan_task,
    global_batches,
    lookup_task,
    numbers,
    train,
)

STEPS = 30


def optimizers() -> dict[str, Any]:
    """Optimizers whose updates are continuous in the gradient: Adam can turn a rounding error into a whole step."""
    return {
        "d_optimizer": keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=0.5),
        "g_optimizer": keras.optimizers.SGD(0.02, momentum=0.9),
    }


def task() -> KerasTask:
    """The task of the GAN."""
    return gan_task(**optimizers())


def trained(world: World, kind: str) -> dict[str, Any]:
    """Largest differences of weights and losses from Keras in one process, and what must be equal on all ranks."""
    framework = framework_of(task, world, kind)
    steps = train(framework, STEPS)
    group = framework.group
    everywhere = group.allgather(
        [[step.get(name, (0.0, 0.0)) for name in ("d_loss", "g_loss")] for step in steps], "report losses"
    )
    totals = np.array(everywhere).sum(0)
    losses = totals[..., 0] / totals[..., 1]
    found = [variable.numpy() for variable in framework.task.model.trainable_variables]
    slots = [t for t in framework.source.variables() if t.name.startswith("optimizer/")]
    sums = [float(np.sum(tensor.host_view(), dtype=np.float64)) for tensor in slots]
    told = {
        "hashes": group.allgather(framework.weights_hash(), "compare the weights"),
        "slots": group.allgather(sums, "compare the slots"),
        "reducer": framework.facts.reducer_name,
    }
    framework.close()
    begin_task(7)
    plain = gan(**optimizers())
    plain.make_train_function()
    wanted = []
    for batch in global_batches(framework.task, STEPS):
        plain.reset_metrics()
        logs = plain.train_function(iter([tuple(tf.constant(array) for array in batch.values())]))
        wanted.append([float(logs["d_loss"]), float(logs["g_loss"])])
    exact = [variable.numpy() for variable in plain.trainable_variables]
    return told | {"weights": furthest(found, exact), "losses": furthest([losses], [np.array(wanted)])}


def looked_up(world: World) -> dict[str, Any]:
    """Largest difference from Keras in one process, for a table of which only rows are exchanged."""
    framework = framework_of(lookup_task, world, "mpi" if world.size > 1 else "none")
    train(framework, STEPS)
    found = [variable.numpy() for variable in framework.task.model.trainable_variables]
    assert isinstance(framework.program, TrainStepProgram)
    told = {
        "hashes": framework.group.allgather(framework.weights_hash(), "compare the weights"),
        "tables": [sum(each.is_table) for each in framework.program.packing.values()],
    }
    framework.close()
    begin_task(7)
    task = adopted(lookup_task(), ("ids", "y"))
    build_weights(task, {name: array[:1] for name, array in task.train.items()})
    task.model.make_train_function()
    for batch in global_batches(task, STEPS):
        task.model.train_function(iter([tuple(tf.constant(array) for array in batch.values())]))
    return told | {"weights": furthest(found, [variable.numpy() for variable in task.model.trainable_variables])}


def said(framework: Any, batches: Any) -> str:
    """The error message of a step that is refused."""
    try:
        framework.step(batches, 8)
    except (UserError, NonFiniteLoss) as error:
        return str(error)
    return ""


def main() -> None:
    """Run all checks."""
    world = connect()
    results: dict[str, Any] = {kind: trained(world, kind) for kind in ("auto", "mpi" if world.size > 1 else "none")}
    results["looked up"] = looked_up(world)
    if world.size == 2:
        framework = framework_of(task, world, "mpi")
        batch = {name: array[:4].copy() for name, array in framework.task.train.items()}
        batch["picture"][0] = np.nan if world.rank == 1 else 0.5
        results["not finite"] = framework.group.allgather(said(framework, [batch]), "say it")
        framework = framework_of(lambda: KerasTask(Halves(world.rank == 1), train=numbers()), world, "mpi")
        batch = {name: array[:4] for name, array in framework.task.train.items()}
        results["other order"] = framework.group.allgather(said(framework, [batch]), "say it")
    if world.rank == 0:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
