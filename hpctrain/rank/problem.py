"""Loads the user's task on this rank: its data, their order and its weights. Refuses conflicting features first."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.comm.world import World
from hpctrain.config.combinations import refuse
from hpctrain.config.features import Feature, used
from hpctrain.config.sections import Config, DataConfig, OptimizerConfig
from hpctrain.data.dataset import Dataset, Samples
from hpctrain.data.formats.sources import open_dataset
from hpctrain.data.global_generators import kept, states
from hpctrain.data.info import sources_of
from hpctrain.data.order import Order, first_draw
from hpctrain.data.samples import Recipe, make_batch
from hpctrain.data.stream import Stream, StreamOrder, digest_of, is_stream, open_stream
from hpctrain.errors import UserError, kind_of
from hpctrain.rank.model_input import described, input_first, takes_first
from hpctrain.run.rank_environment import STAGED
from hpctrain.tasks.definition import KerasTask, Task, TorchScheduler, TorchTask, first_field
from hpctrain.tasks.load_task import load_task, require_callables, require_fields, require_function, require_shares
from hpctrain.tasks.tf_environment import set_environment, without_chatter
from hpctrain.tasks.tp_plan import cuts_of
from hpctrain.train.hooks import Hook, rate_hook
from hpctrain.train.schedule import global_batch, validation_batch
from hpctrain.train.seeds import seed_python
from hpctrain.train.stateful import kept_state


def staged_args(task_args: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Returns the task's arguments, with each string that names a staged source replaced by the path of its copy."""
    copies = json.loads(environ.get(STAGED) or "{}")
    return {key: _replaced(value, copies) for key, value in task_args.items()}


def _replaced(value: Any, copies: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _replaced(item, copies) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_replaced(item, copies) for item in value]
    return copies.get(value, value) if isinstance(value, str) else value


def seed_task(seed: int, precision: str, local_rank: int) -> None:
    """Seeds Python, NumPy and each imported framework, the same on all ranks, and selects this rank's GPU.

    So initial weights do not depend on the number of ranks. ``precision`` (fp32, bf16, fp16) becomes Keras' policy for
    layers made from now on.
    """
    seed_python(seed)
    if "torch" in sys.modules:
        from hpctrain.backends.torch.device import begin_task

        begin_task(seed, local_rank)
    if not {"tensorflow", "keras"}.isdisjoint(sys.modules):
        from hpctrain.backends.tensorflow import runtime

        runtime.begin_task(seed, precision, local_rank)


NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
"""Valid name of a validation set."""


@dataclasses.dataclass(frozen=True)
class Loading:
    """How samples become this rank's batches."""

    recipe: Recipe
    """How training samples become a batch: transform, collate, seed."""
    micro_batches: int
    """Micro-batches in this rank's part of a global batch."""
    validation_batch: int
    """Samples in a rank's batch of validation data."""
    prefetch_batches: int
    """Batches prepared ahead of use."""
    workers: int
    """Processes that read and transform training data; 0: a thread of this process does it."""
    unused_workers: int = 0
    """``num_workers`` of a DataLoader, in place of which ``workers`` counts."""

    @property
    def validation_recipe(self) -> Recipe:
        """How validation samples become a batch: not transformed, and with the arrays in the order trained on."""
        draws = self.recipe.draws and self.recipe.collate is not None
        return dataclasses.replace(self.recipe, transform=None, draws=draws)


@dataclasses.dataclass(frozen=True)
class Problem:
    """A task on this rank. Making it involves no communication, so each rank can fail by itself."""

    task: Task
    train: Dataset | Stream
    validation: Mapping[str, Dataset]
    """Validation sets by name; a single unnamed set is called ``validation``."""
    order: Order | StreamOrder
    """Global order of the training samples, over all ranks."""
    loading: Loading

    def fingerprint(self) -> str:
        """Returns a fingerprint of the training data, and of the sampler if there is one."""
        sampler = self.order.fingerprint()
        return self.train.fingerprint() + (f" sampler {sampler}" if sampler else "")

    def described(self, batch: Samples) -> str:
        """Says what becomes of a training batch, for the user."""
        found = described(self.task, self.loading.recipe.names, batch)
        loading = self.loading
        if loading.unused_workers and not loading.workers:
            unused = f"num_workers={loading.unused_workers} of the DataLoader is not used"
            found += f"\na thread of each rank reads the data, since data.workers is 0; {unused}"
        return found

    def sources(self) -> list[dict[str, Any]]:
        """Returns the tables that the training data were read or copied from; empty for streams."""
        return [] if isinstance(self.train, Stream) else sources_of(self.train)


def make_problem(config: Config, world: World, verbose: bool = False) -> Problem:
    """Calls the user's task function and opens its data.

    Args:
        verbose: show TensorFlow's start-up messages.

    Raises:
        UserError: the task or its data cannot be loaded.
    """
    seed = partial(seed_task, config.seed, config.train.precision, world.local_rank)
    set_environment(config.train.threads, verbose)
    with without_chatter(verbose):
        task = load_task(config.task, staged_args(config.task_args), world, seed)
    require_fields(task)
    data = config.data
    batch = global_batch(config.train, world.data.size, world.size // world.data.size)
    unused_workers = getattr(task.train, "num_workers", 0)
    task = without_loaders(task, batch, batch // world.data.size, config.train.accumulate, data)
    task = with_optimizer(task, config.optimizer)
    if config.parallel.tensor > 1 and isinstance(task, TorchTask) and not task.tensor:
        task = dataclasses.replace(task, tensor=cuts_of(task.model))
    order: Order | StreamOrder
    train = open_training_data(task)
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
    task, recipe = with_input(task, train, config.seed)
    refuse(config.features() | task_features(config.task, task, order, world.data.size))
    sets = validation_sets(task)
    validation = {name: open_validation(task, name, given) for name, given in sets.items()}
    task = with_weights(task, config.train.precision, train, recipe)
    loading = Loading(
        recipe,
        1 if has_own_step(task) else config.train.accumulate,  # a custom step splits its batch by ctx.split
        validation_batch(config.train, world.data.size),
        data.prefetch_batches,
        data.workers,
        unused_workers,
    )
    return Problem(task, train, validation, order, loading)


def without_loaders(task: Task, batch: int, share: int, accumulate: int, data: DataConfig) -> Task:
    """Returns the task with its torch DataLoaders replaced by their datasets.

    Raises:
        UserError: a DataLoader's settings contradict the run file.
    """
    if not isinstance(task, TorchTask):
        return task
    from hpctrain.backends.torch.task.data_loader import Batches, without_loaders

    sizes = (batch, share, share // accumulate)
    return without_loaders(task, Batches(sizes, data.shuffle, data.drop_last))


def with_optimizer(task: Task, asked: OptimizerConfig) -> Task:
    """Returns the task with the optimizer named in the run file, if any. Raises UserError if the task has its own."""
    if asked.name is None or task.model is None:
        return task
    own = task.optimizer
    if isinstance(task, TorchTask):
        from hpctrain.backends.torch.task.by_name import make_optimizer
    else:
        from hpctrain.backends.keras.keras_compiled import make_optimizer

        own = getattr(task.model, "optimizer", None) if own is None else own  # compile() makes one
    if own is not None or isinstance(task.model, Mapping):
        what = f"its own, {type(own).__name__}" if own is not None else "several models"
        fix = "leave optimizer= and compile() out of the task, or optimizer: out of the run file"
        raise UserError(f"the run file names optimizer {asked.name}, and the task has {what}", fix)
    return dataclasses.replace(task, optimizer=make_optimizer(asked.name, asked.options, task.model))


def with_its_loss(task: Task, fields: Sequence[str]) -> Task:
    """Returns the task with its loss as a function, if it was given as a name or as an object of its framework.

    Also checks the task's hooks, callables and state.

    Raises:
        UserError: one of them cannot be used.
    """
    require_hooks(task)
    if isinstance(task, KerasTask):
        from hpctrain.backends.keras.keras_compiled import adopted
        from hpctrain.backends.keras.keras_model import trains_itself

        task = adopted(task, fields)
        require_callables(task, "Keras", trains_itself(task.model))
        return task
    from hpctrain.backends.torch.state.optimizer import joined
    from hpctrain.backends.torch.task.by_name import as_loss

    task = dataclasses.replace(task, optimizer=joined(task.optimizer))
    own = has_own_step(task)
    kept_state(task.state)  # refuse state that cannot be saved before anything else is made
    if task.loss is not None or not own:
        task = dataclasses.replace(task, loss=as_loss(task.loss, fields))
    require_callables(task, "torch", own)
    if isinstance(task, TorchTask):
        require_shares(task.tensor, task.layers)
        if own:
            require_function("step", task.step, "(ctx, batch)", "torch tensors")
    return task


def validation_sets(task: Task) -> dict[str, Any]:
    """Returns a task's validation sets by name. Raises UserError for names that cannot prefix metrics."""
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
    """Whether a value is a whole dataset rather than one array of a dataset."""
    if isinstance(value, (list, tuple)):
        return bool(value) and all(isinstance(item, (str, Path)) for item in value)
    return not isinstance(value, np.ndarray) and "__array__" not in dir(value)


def open_validation(task: Task, name: str, given: Any) -> Dataset:
    """Opens one validation set. Raises UserError."""
    if is_stream(given):
        which = "" if name == "validation" else f" {name!r}"
        raise UserError(
            f"the validation data{which} of the task is a stream",
            "give data of known length: take its first samples into arrays, or write them to HDF5",
        )
    with of_field("validation" if name == "validation" else f"validation[{name!r}]"):
        return open_dataset(given, ragged=task.collate is not None)


@contextlib.contextmanager
def of_field(field: str) -> Iterator[None]:
    """Prefixes UserErrors raised in the body with the name of the task's field."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{field} of the task: {error.what}", error.fix, error.code) from error


def open_training_data(task: Task) -> Dataset | Stream:
    """Opens the task's training data. Raises UserError."""
    with of_field("train"):
        if is_stream(task.train):
            return open_stream(task.train)
        return open_dataset(task.train, ragged=task.collate is not None)


def examples_of(train: Dataset | Stream, most: int = 1) -> Dataset:
    """Returns a dataset of example samples: the training data itself, or the first samples of a stream."""
    return train.example(most) if isinstance(train, Stream) else train


def with_input(task: Task, train: Dataset | Stream, seed: int) -> tuple[Task, Recipe]:
    """Returns the task with its loss as a function, and how its samples become batches, with the model's input first.

    Raises UserError if nothing says which array is the input, or as ``with_its_loss`` does.
    """
    recipe = Recipe(task.transform, task.collate, seed)
    names: tuple[str, ...] = tuple(train.fields)
    if task.transform is not None or task.collate is not None:
        with kept():
            before = digest_of(states())
            names = tuple(make_batch(examples_of(train), recipe, first_draw(np.arange(1))))
            with contextlib.suppress(UserError):  # a collate that permutes samples draws nothing for one
                make_batch(examples_of(train), recipe, first_draw(np.zeros(2, np.int64)))
            recipe = dataclasses.replace(recipe, draws=digest_of(states()) != before)
    names, by_place = input_first(task, train, names), takes_first(task)
    return with_its_loss(task, names), dataclasses.replace(recipe, names=names if by_place else ())


def runs_on_torch(task: Task) -> bool:
    """Whether this is a Keras task on Keras' PyTorch backend."""
    return isinstance(task, KerasTask) and sys.modules["keras"].config.backend() == "torch"


def with_weights(task: Task, precision: str, train: Dataset | Stream, recipe: Recipe) -> Task:
    """Builds the weights of a Keras model that would build them on its first batch, by calling it on one sample.

    Returns a task of PyTorch if Keras runs on it, and else the same task.
    """

    def sample() -> Samples:
        return make_batch(examples_of(train), recipe, first_draw(np.arange(1)))

    if isinstance(task, KerasTask) and runs_on_torch(task):
        from hpctrain.backends.torch.keras.keras_adapter import on_torch

        return on_torch(task, precision, sample)
    if isinstance(task, KerasTask):
        from hpctrain.backends.keras.keras_model import lacks_weights
        from hpctrain.backends.tensorflow.state.weights import build_weights

        if lacks_weights(task.model):
            build_weights(task, sample())
    return task


def require_same_data(problem: Problem, world: World) -> None:
    """Raises UserError on all ranks if they have different training data. Collective."""
    prints = world.everyone.allgather(problem.fingerprint(), "compare their training data")
    others = [rank for rank, each in enumerate(prints) if each != prints[0]]
    if others:
        raise UserError(
            f"rank{'s' if others[1:] else ''} {', '.join(map(str, others[:8]))}: other training data than on rank 0",
            "look for old copies on node-local disks, and for task functions and samplers that draw data at random",
        )


def require_hooks(task: Task) -> None:
    """Raises UserError if one of the task's hooks is not a hook."""
    for hook in task.hooks:
        if isinstance(hook, type) or not isinstance(hook, Hook):
            what = f"hooks= of the task holds {kind_of(hook)}"
            fix = "derive hooks from hpctrain.BaseHook, and give objects: hooks=[MyHook()]"
            raise UserError(what, f"{fix}; train.early_stop and schedule: in the run file replace callbacks of fit")


def has_own_step(task: Task) -> bool:
    """Whether the task has a custom training step."""
    return isinstance(task, TorchTask) and task.step is not None


def task_features(name: str, task: Task, order: Order | StreamOrder, ranks: int) -> dict[Feature, Any]:
    """Returns the features that a task and its data use.

    Args:
        name: the task's name in the run file, for messages.
        task: the task.
        order: order of the training samples.
        ranks: number of data-parallel ranks.
    """
    rest = order.epoch_samples % order.global_batch if isinstance(order, Order) and not order.drop_last else 0
    validates, own_step = task.validation is not None, has_own_step(task)
    given = {
        Feature.KERAS: isinstance(task, KerasTask) and not runs_on_torch(task),
        Feature.NO_FORWARD: task.forward is first_field,
        Feature.NO_EVAL_LOSS: own_step and task.loss is None and not task.metrics,
        Feature.NO_VALIDATION: not validates and name,
        Feature.OWN_STEP: own_step,
        Feature.RANKS: ranks > 1 and ranks,
        Feature.NO_CUTS: isinstance(task, TorchTask) and not task.tensor,
        Feature.SAMPLER: task.sampler is not None,
        Feature.SEVERAL_MODELS: isinstance(task.model, Mapping),
        Feature.SEVERAL_OPTIMIZERS: isinstance(task.optimizer, Mapping),
        Feature.SHORT_BATCH: rest < ranks and rest,
        Feature.STREAM: isinstance(order, StreamOrder) and name,
        Feature.TASK_SCHEDULE: task.schedule is not None,
        Feature.VALIDATION: validates,
    }
    return used(given) | rate_features(task, task.hooks)


def rate_features(task: Task, hooks: Sequence[Hook]) -> dict[Feature, Any]:
    """Returns the features for stateful control of the learning rate: by a TorchScheduler or by one of the hooks."""
    scheduler = task.schedule if isinstance(task.schedule, TorchScheduler) else None
    given = {
        Feature.EVALUATION_SCHEDULER: scheduler is not None and scheduler.every == "evaluation",
        Feature.RATE_HOOK: rate_hook(hooks),
        Feature.TORCH_SCHEDULER: scheduler is not None,
    }
    return used(given)
