"""Trains Keras models with sharded optimizer state, by scenario; rank 0 prints JSON.

tensorflow_sharded.py <folder> <scenario> ...
"""

from __future__ import annotations

import json
import shutil
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hpctrain.backends.tensorflow.framework import KerasFramework
from hpctrain.backends.tensorflow.reducer import Pieces
from hpctrain.backends.tensorflow.runtime import begin_task
from hpctrain.backends.tensorflow.state.tensors import optimizer_tensors
from hpctrain.backends.tensorflow.steps.passes import Applying
from hpctrain.backends.tensorflow.strategies.probe import stand_in
from hpctrain.backends.tensorflow.strategies.zero1 import ShardedReducers, ShardedUpdate, shard_optimizer
from hpctrain.comm.world import World, alone, connect, from_communicator
from hpctrain.config.sections import ParallelConfig, TrainConfig
from hpctrain.errors import UserError
from hpctrain.reduce.candidates import Candidate
from hpctrain.system import shared_memory
from hpctrain.train.clock import IntervalClock
from hpctrain.train.framework import NonFiniteLoss
from hpctrain.train.stateful import value_of
from tests.support.attempts import attempt, furthest
from tests.tasks import tensorflow_sharded as sharded
from tests.tasks.tensorflow_tasks import (
    cut,
    embedding_model,
    global_batches,
    make_framework,
    plain_model,
    train,
    weighted_loss,
)

SHARDED, WHOLE = ParallelConfig(shard="optimizer"), ParallelConfig()
UPDATES = 6
LATER = 3
"""Updates before a stop."""
TASK = "tests.tasks.tensorflow_sharded:task"


def numbers_of(framework: KerasFramework) -> list[Any]:
    """Weights and their moving averages."""
    variables = framework.task.model.trainable_variables
    return [np.array(one.numpy()) for one in (*(variable.value for variable in variables), *framework.source.averages)]


def compared(slots: dict[str, Any], whole: dict[str, Any]) -> dict[str, Any]:
    """This rank's optimizer state compared with that of one process."""
    difference = 0.0
    for name, (tensor, value) in slots.items():
        at = tensor.cut.begin if tensor.cut else (0,) * value.ndim
        there = whole[name][1][tuple(slice(begin, begin + size) for begin, size in zip(at, value.shape, strict=True))]
        difference = max(difference, furthest([value], [there]))
    return {
        "slots": difference,
        "elements": sum(value.size for tensor, value in slots.values() if tensor.cut),
        "of all": sum(value.size for name, (_, value) in whole.items() if name.count("/") > 1),
        "cut": [name for name, (tensor, value) in slots.items() if tensor.cut and tensor.cut.shape != value.shape],
    }


def one_optimizer(world: World, make: Callable[[], Any]) -> dict[str, Any]:
    """Compare with one process that sees whole batches: accumulation, clipping and moving averages."""
    settings: dict[str, Any] = {"optimizer": make, "accumulate": 2, "clip_norm": 0.2, "ema_decay": 0.9}
    found = []
    for ranks, parallel in ((world, SHARDED), (alone(), WHOLE)):
        kind = "mpi" if ranks.size > 1 else "none"
        framework = make_framework(ranks, sharded.model, parallel=parallel, kind=kind, **settings)
        losses = train(framework, UPDATES + 1, 2)  # the last global batch is smaller than the others
        slots = {one.name: (one, value_of(one)) for one in framework.state() if one.name.startswith("optimizer/")}
        found.append((numbers_of(framework), slots, losses, framework.facts.reducer_name))
        framework.close()
    (numbers, slots, losses, reducer), (wanted, whole, others, _) = found
    mine = compared(slots, whole) | {"numbers": furthest([*numbers, np.array(losses)], [*wanted, np.array(others)])}
    return {"ranks": world.data.allgather(mine, "compare"), "reducer": reducer}


def updated(world: World, make: Callable[[], Any]) -> dict[str, Any]:
    """Compare some updates by given gradients with those of an unsharded optimizer."""
    begin_task(7)
    model, plain = sharded.model(), make()
    variables, pieces = model.trainable_variables, Pieces(model.trainable_variables)
    initial = [np.array(one.value) for one in variables]
    optimizer = make()
    own, places = shard_optimizer(optimizer, variables, pieces, world.data, {})
    reducer = ShardedReducers(own).open(Candidate("mpi", "sharded"), world.data)
    update = ShardedUpdate(
        optimizer, variables, reducer, IntervalClock(), Applying(TrainConfig(steps=1, global_batch=1))
    )
    step = tf.function(lambda given: update.run([], reducer.borrow(given)[:-1]), autograph=False)
    wholes = [stand_in(one, value) for one, value in zip(variables, initial, strict=True)]
    begin_task(7)  # resets the counters of its names
    plain.build(wholes)
    for number in range(UPDATES):
        every = [
            [np.random.default_rng([number, rank, index]).normal(size=one.shape) for index, one in enumerate(initial)]
            for rank in range(world.size)
        ]
        step(pieces.pack(every[world.rank], 0.0))
        plain.apply([tf.constant(sum(parts)) for parts in zip(*every, strict=True)], wholes)
    reducer.close()
    found = [
        {one.name: (one, value_of(one)) for one in optimizer_tensors(each, model, own=slots)}
        for each, slots in ((optimizer, places), (plain, None))
    ]
    numbers = furthest([np.array(one.value) for one in variables], [np.array(one.value) for one in wholes])
    return {"ranks": world.data.allgather(compared(*found) | {"numbers": numbers}, "compare")}


def optimizers(world: World, folder: Path) -> dict[str, Any]:
    """Results by optimizer."""
    return {name: updated(world, make) for name, make in {**sharded.BY_ROWS, **sharded.WHOLE}.items()}


def messages(world: World, folder: Path) -> dict[str, Any]:
    """The same without shared memory between ranks."""
    before, shared_memory.FOLDER = shared_memory.FOLDER, "/nonexistent"
    try:
        return one_optimizer(world, sharded.BY_ROWS["AdamW"])
    finally:
        shared_memory.FOLDER = before


def many(world: World, folder: Path) -> dict[str, Any]:
    """More ranks than variables of any size: some ranks have nothing to update."""
    return one_optimizer(world, sharded.WHOLE["Lamb"])


def curves(world: World, folder: Path) -> dict[str, Any]:
    """Losses and weights of some float32 updates, sharded and replicated, by way of training; the longest also compared
    with one process."""
    adam = {"optimizer": lambda: keras.optimizers.Adam(1e-2)}
    settings: dict[str, dict[str, Any]] = {
        "clipped and weighted": adam | {"clip_norm": 0.3, "ema_decay": 0.9, "loss": weighted_loss},
        "compiled": adam | {"compile": True},
        "fp16": adam | {"precision": "fp16"},
        "tables": adam | {"model": embedding_model},
        "Muon": {"optimizer": lambda: keras.optimizers.Muon(1e-2)},
    }
    found = {}
    for name, changes in settings.items():
        each, is_long = [], name.startswith("clipped")
        ways = [(world, SHARDED, "mpi"), (world, WHOLE, "mpi"), *([(alone(), WHOLE, "none")] if is_long else [])]
        for ranks, parallel, kind in ways:
            framework = make_framework(ranks, **({"model": plain_model} | changes), parallel=parallel, kind=kind)
            losses = train(framework, 50 if is_long else 14)
            each.append((losses, numbers_of(framework), framework.weights_hash()))
            framework.close()
        (losses, numbers, digest), *others = each
        mine = {
            "losses": max(furthest([np.array(losses)], [np.array(other)]) for other, _, _ in others),
            "numbers": max(furthest(numbers, wanted) for _, wanted, _ in others),
        }
        mine["falls"] = float(np.mean(losses[-7:]) / np.mean(losses[:7]))
        found[name] = world.data.allgather({**mine, "hash": digest}, "compare")
    return found


def overflow(world: World, folder: Path) -> dict[str, Any]:
    """An infinite gradient on one rank skips the update on all, and the next one is made; without a loss scale it ends
    the run on all."""
    batch = next(global_batches(1))
    spoiled = {**batch, "x": batch["x"].copy()}
    spoiled["x"][-1, 0] = np.inf
    framework = make_framework(world, precision="fp16", parallel=SHARDED)
    train(framework, 1)
    hashes = [framework.weights_hash()]
    for each in (spoiled, batch):
        framework.step(cut(each, world.rank, world.size), 30)
        hashes.append(framework.weights_hash())
    framework.close()
    framework = make_framework(world, parallel=SHARDED)
    train(framework, 1)
    before, ranks = framework.weights_hash(), None
    try:
        framework.step(cut(spoiled, world.rank, world.size), 30)
    except NonFiniteLoss as error:
        ranks = error.ranks
    mine = {"hashes": hashes, "ranks": ranks, "unchanged": framework.weights_hash() == before}
    framework.close()
    return {"ranks": world.data.allgather(mine, "compare")}


class Hiding(keras.optimizers.SGD):
    """Has a variable that is missing from its ``variables``."""

    def build(self, variables: list[Any]) -> None:
        """Also creates an untracked variable."""
        super().build(variables)
        self.hidden = {"sum": tf.Variable(tf.zeros(len(variables)))}


def refused(world: World, folder: Path) -> dict[str, Any]:
    """Error messages for optimizers that cannot be sharded."""
    made: dict[str, Callable[[], Any]] = {
        "coupled": lambda: sharded.Coupled(0.1),
        "hiding": lambda: Hiding(0.1),
        "clipping": lambda: keras.optimizers.Adam(0.1, global_clipnorm=1.0),
    }
    said = {}
    for name, make in made.items():
        try:
            make_framework(world, optimizer=make, parallel=SHARDED).close()
        except UserError as error:
            said[name] = error.what
    return {"said": world.data.allgather(said, "compare")}


def resumed(world: World, folder: Path) -> dict[str, Any]:
    """Stopped with sharded and with unsharded state, and resumed on other numbers of ranks, both ways."""
    comm = world.everyone.comm
    assert comm is not None
    parts = {size: from_communicator(comm.Split(int(world.rank < size), world.rank)) for size in {1, 2, world.size}}
    plans = [(SHARDED, 1, WHOLE), (SHARDED, 2, SHARDED), (SHARDED, world.size, WHOLE), (WHOLE, world.size, SHARDED)]
    uninterrupted = attempt(world, folder / "uninterrupted", SHARDED, TASK, UPDATES)
    wanted_ids, wanted = (
        attempt(parts[1], folder / f"alone-{world.rank}", WHOLE, TASK, UPDATES) if world.rank == 0 else ([], {})
    )
    for begun in (SHARDED, WHOLE):
        attempt(world, folder / begun.shard, begun, TASK, UPDATES, LATER)
    found: dict[str, Any] = {}
    for begun, size, parallel in [*plans, (SHARDED, world.size, SHARDED)]:
        copy = folder / f"{begun.shard}-{size}-{parallel.shard}"
        if world.rank == 0:
            shutil.copytree(folder / begun.shard, copy)
        world.everyone.barrier("copy the run folder")
        if world.rank < size:
            ids, state = attempt(parts[size], copy, parallel, TASK, UPDATES)
            if world.rank == 0:
                same = all(np.array_equal(state[name], value) for name, value in uninterrupted[1].items())
                found[copy.name] = {
                    "ids": ids == wanted_ids[LATER:],
                    "names": state.keys() == wanted.keys(),
                    "difference": furthest(list(state.values()), [wanted[name] for name in state]),
                    "same": same,
                }
        world.everyone.barrier("resume")
    return found


SCENARIOS: dict[str, Callable[[World, Path], dict[str, Any]]] = {
    each.__name__: each for each in (optimizers, messages, many, curves, overflow, refused, resumed)
}


def main() -> None:
    """Run the scenarios; rank 0 prints."""
    world = connect()
    found = {}
    for name in sys.argv[2:]:
        begin = time.perf_counter()
        found[name] = SCENARIOS[name](world, Path(sys.argv[1]))
        print(f"{name}: {time.perf_counter() - begin:.1f} s", file=sys.stderr)
    if world.rank == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        traceback.print_exc()
        connect().everyone.comm.Abort(1)  # type: ignore[union-attr]
