"""What a task is made of, on this rank: its data, their order, its weights."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.comm.world import World
from hpctrain.config.combinations import refuse
from hpctrain.config.sections import Config
from hpctrain.data import Dataset, Order, Samples, Stream, StreamOrder, open_dataset, open_stream, part_of
from hpctrain.data.order import first_draw
from hpctrain.data.samples import Recipe, make_batch
from hpctrain.data.stream import is_stream
from hpctrain.errors import UserError
from hpctrain.frameworks.seeding import seed_task
from hpctrain.frameworks.tensorflow import runtime
from hpctrain.rank.features import has_own_step, pieces_of, task_features
from hpctrain.rank.staged import staged_args
from hpctrain.tasks.checks import require_callables, require_fields, require_function, require_shares
from hpctrain.tasks.definition import KerasTask, Task, TorchTask
from hpctrain.tasks.loading import load_task
from hpctrain.train.hooks import Hook
from hpctrain.train.plan import global_batch
from hpctrain.train.stateful import kept_state

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
"""Of a set of validation data."""


@dataclass(frozen=True)
class Problem:
    """What a task is made of, on this rank. Making it needs no other rank, so that each can fail by itself."""

    task: Task
    train: Dataset | Stream
    validation: Mapping[str, Dataset]
    """Sets by name; one without a name is called so itself."""
    order: Order | StreamOrder
    """Of the training samples, over all ranks."""

    def fingerprint(self) -> str:
        """Of the training data, and of the sampler if there is one."""
        sampler = self.order.fingerprint()
        return self.train.fingerprint() + (f" sampler {sampler}" if sampler else "")


def make_problem(config: Config, world: World) -> Problem:
    """Calls the user's task function and opens its data.

    Raises:
        UserError: the task or its data cannot be loaded.
    """
    seed = partial(seed_task, config.seed, config.train.precision, world.local_rank)
    runtime.set_environment(config.train.threads)
    with runtime.without_chatter():
        task = load_task(config.task, staged_args(config.task_args), world, seed)
    require_fields(task)
    data = config.data
    batch = global_batch(config.train, world.data.size, world.size // world.data.size)
    order: Order | StreamOrder
    train = open_training_data(task, data.allow_outside)
    if isinstance(train, Stream):
        order = StreamOrder(batch, data.drop_last)
    else:
        order = Order(
            length=len(train),
            global_batch=batch,
            seed=config.seed,
            shuffle=data.shuffle,
            block_samples=data.block_samples,
            drop_last=data.drop_last,
            sampler=task.sampler,
        )
    task = with_its_loss(task, tuple(examples_of(train).fields))
    refuse(config.features() | task_features(config, task, order, world.data.size))
    validation = {name: open_validation(config, task, name, given) for name, given in validation_sets(task).items()}
    make_weights(task, lambda: examples_of(train), config.seed)
    return Problem(task, train, validation, order)


def with_its_loss(task: Task, fields: Sequence[str]) -> Task:
    """The task with a function in place of a loss that is a name, or one of its framework's own."""
    if isinstance(task, KerasTask):
        from hpctrain.frameworks.tensorflow import adopted, trains_itself

        task = adopted(task, fields)
        require_callables(task, "Keras", trains_itself(task.model))
        return task
    from hpctrain.frameworks.torch.losses import as_loss
    from hpctrain.frameworks.torch.optimizer import joined

    task = dataclasses.replace(task, optimizer=joined(task.optimizer))
    own = has_own_step(task)
    require_hooks(task)
    kept_state(task.state)  # what cannot be kept is refused before anything else is made
    if task.loss is not None or not own:
        task = dataclasses.replace(task, loss=as_loss(task.loss, fields))
    require_callables(task, "torch", own)
    if isinstance(task, TorchTask):
        require_shares(task.tensor, task.layers)
        if own:
            require_function("step", task.step, "(ctx, batch)", "torch tensors")
    return task


def first_batch(problem: Problem, config: Config, world: World, most: int | None = None) -> Samples:
    """This rank's first micro-batch, ``most`` samples of it at most; empty if it has no part in the first batch."""
    recipe = Recipe(problem.task.transform, problem.task.collate, config.seed)
    if not isinstance(problem.order, Order):
        return make_batch(examples_of(problem.train), recipe, first_draw(np.arange(1)))
    ids = problem.order.batch_indices(0, 0)
    mine = ids[part_of(len(ids), world.data.rank, world.data.size)]
    mine = mine[part_of(len(mine), 0, min(pieces_of(config, problem.task), max(len(mine), 1)))][:most]
    return make_batch(examples_of(problem.train), recipe, first_draw(mine))


def validation_sets(task: Task) -> dict[str, Any]:
    """Of a task, by name. Raises UserError for names that cannot stand before those of metrics."""
    given = task.validation
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not given or not any(is_source(value) for value in given.values()):
        return {"validation": given}
    for name, value in given.items():
        if not isinstance(name, str) or not NAME.fullmatch(name) or name in task.metrics or name == "loss":
            fix = "name it by letters, digits, - and _, and not as a metric"
            raise UserError(f"validation={{{name!r}: ...}} of the task cannot name a set of validation data", fix)
        if not is_source(value):
            what = f"validation of the task holds both sets of data and arrays, such as {name!r}"
            raise UserError(what, "give one set as a dict of arrays, or several as a dict of them by name")
    return dict(given)


def is_source(value: Any) -> bool:
    """Whether a value is data of its own, not one array of a set."""
    if isinstance(value, (list, tuple)):
        return bool(value) and all(isinstance(item, (str, Path)) for item in value)
    return not isinstance(value, np.ndarray) and "__array__" not in dir(value)


def open_validation(config: Config, task: Task, name: str, given: Any) -> Dataset:
    """One set; raises UserError."""
    if is_stream(given):
        which = "" if name == "validation" else f" {name!r}"
        raise UserError(
            f"the validation data{which} of task {config.task} is a stream",
            "give data of known length: take its first samples into arrays, or write them to HDF5",
        )
    return open_dataset(given, allow_outside=config.data.allow_outside, ragged=task.collate is not None)


def open_training_data(task: Task, allow_outside: Sequence[str] = ()) -> Dataset | Stream:
    """Whatever the task trains on."""
    if is_stream(task.train):
        return open_stream(task.train)
    return open_dataset(task.train, allow_outside=allow_outside, ragged=task.collate is not None)


def examples_of(train: Dataset | Stream) -> Dataset:
    """Samples such as those that are trained on: of a stream the first one."""
    return train.example() if isinstance(train, Stream) else train


def make_weights(task: Task, train: Callable[[], Dataset], seed: int) -> None:
    """Makes the weights of a Keras model that waits for its first batch, by a dry call on one sample of its data."""
    if isinstance(task, KerasTask):
        from hpctrain.frameworks.tensorflow.weights import build_weights, lacks_weights

        if lacks_weights(task.model):
            recipe = Recipe(task.transform, task.collate, seed)
            build_weights(task, make_batch(train(), recipe, first_draw(np.arange(1))))


def require_same_data(problem: Problem, world: World) -> None:
    """Raises UserError, on all ranks, if some of them read other training data than the rest. Collective."""
    prints = world.everyone.allgather(problem.fingerprint(), "compare their training data")
    others = [rank for rank, each in enumerate(prints) if each != prints[0]]
    if others:
        raise UserError(
            f"ranks {', '.join(map(str, others[:8]))} read other training data than rank 0",
            "look for old copies on node-local disks, and for task functions and samplers that draw data at random",
        )


def require_hooks(task: Task) -> None:
    """Raises UserError if one of the task's hooks is not a hook."""
    for hook in task.hooks:
        if isinstance(hook, type) or not isinstance(hook, Hook):
            name = hook.__name__ if isinstance(hook, type) else type(hook).__name__
            what = f"hooks= of the task holds {'the class' if isinstance(hook, type) else 'a'} {name}"
            raise UserError(what, "derive hooks from hpctrain.BaseHook, and give objects: hooks=[MyHook()]")
