"""DataLoaders that are given as data: takes their dataset, order and collate_fn, and refuses other settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils import data

from hpctrain.backends.torch.state.tensors import kept_random_state
from hpctrain.data.order import Epoch
from hpctrain.data.samplers import WeightedSampler
from hpctrain.data.samples import Sample, host, named
from hpctrain.errors import UserError, kind_of
from hpctrain.system.array_types import Ints
from hpctrain.tasks.definition import Task

Sampler = Callable[[Epoch], Ints]


@dataclasses.dataclass(frozen=True)
class Batches:
    """The run file's settings of batches and their order."""

    sizes: tuple[int, ...]
    """Samples per update over all ranks, on one rank, and in one of its micro-batches."""
    shuffle: str
    """``data.shuffle``."""
    drop_last: bool
    """``data.drop_last``."""


def without_loaders(task: Task, batches: Batches) -> Task:
    """Replaces DataLoaders in a task by their datasets, samplers and collate_fn.

    Workers and pinned memory do not affect results and are ignored: hpctrain prefetches itself.

    Raises:
        UserError: a setting of a DataLoader would mean something else here.
    """
    several = isinstance(task.validation, Mapping)
    sets = dict(task.validation) if several else {"": task.validation}
    of_train = [task.train] if isinstance(task.train, data.DataLoader) else []
    of_validation = [source for source in sets.values() if isinstance(source, data.DataLoader)]
    loaders = of_train + of_validation
    if not loaders:
        return task
    for loader in loaders:
        if loader.batch_size is None:
            fix = "give it batch_size, and set the order of samples by sampler= of the task"
            raise UserError("a DataLoader without batch_size, or with a batch_sampler, was given as data", fix)
    for loader in of_validation:
        check_validation(loader)
    for loader in of_train:
        check_batches(loader, batches)
        task = dataclasses.replace(task, train=loader.dataset, sampler=sampler_of(task, loader, batches.shuffle))
    sets = {name: source.dataset if isinstance(source, data.DataLoader) else source for name, source in sets.items()}
    collate = collate_of(task, loaders)
    return dataclasses.replace(task, validation=sets if several else sets[""], collate=collate)


def collate_of(task: Task, loaders: Sequence[data.DataLoader[Any]]) -> Callable[[list[dict[str, Any]]], Any] | None:
    """Returns the task's collate function, or one equal to its loaders'. Raises UserError if they differ."""
    functions: list[Any] = []  # not a set: functions may be unhashable dataclasses
    for loader in loaders:
        function = None if loader.collate_fn is data.default_collate else loader.collate_fn
        if function not in functions:
            functions.append(function)
    if all(function is None or function == task.collate for function in functions):
        return task.collate
    if len(functions) > 1 or task.collate is not None:
        fix = "give all of them the same collate_fn, or none, and TorchTask(collate=...) instead"
        raise UserError("the task's data have different collate_fn", fix)
    return Collate(functions.pop(), example_of(loaders[0].dataset))


def check_batches(loader: data.DataLoader[Any], batches: Batches) -> None:
    """Raises UserError if the training data's batches would differ from those of the run file."""
    if loader.batch_size is not None and loader.batch_size not in batches.sizes:
        what = f"the DataLoader of train has batch_size={loader.batch_size}, and the run file asks for"
        sizes = f"{batches.sizes[0]} samples an update, {batches.sizes[1]} on each rank"
        fix = f"set train.batch_per_rank to {loader.batch_size}, or batch_size to one of them"
        raise UserError(f"{what} {sizes}", fix)
    if loader.drop_last and not batches.drop_last:
        raise UserError("the DataLoader of train has drop_last=True", "set data.drop_last: true in the run file, too")


def check_validation(loader: data.DataLoader[Any]) -> None:
    """Raises UserError unless every sample is validated exactly once."""
    if loader.drop_last:
        raise UserError("the DataLoader of validation has drop_last=True", "leave it out: every sample counts once")
    if (found := order_of(loader)) is not None and found not in (in_order, shuffled):
        what = f"the DataLoader of validation has {kind_of(loader.sampler)}"
        raise UserError(what, "give data whose samples all count once, such as a torch.utils.data.Subset")


def sampler_of(task: Task, loader: data.DataLoader[Any], shuffle: str) -> Sampler | None:
    """Returns a sampler equivalent to the loader's; None if ``data.shuffle`` already has that effect.

    Raises:
        UserError: there is no equivalent, or it conflicts with the task or the run file.
    """
    if isinstance(loader.dataset, data.IterableDataset):
        return task.sampler
    found, kind = order_of(loader), kind_of(loader.sampler)
    if found is None:
        fix = "give TorchTask(sampler=...), a function of an hpctrain.Epoch that returns indices"
        raise UserError(f"the DataLoader of train has {kind}, which hpctrain cannot share between ranks", fix)
    if task.sampler is not None:
        if found is in_order:
            return task.sampler
        raise UserError(f"the DataLoader of train has {kind}, and the task a sampler", "keep one of them")
    if found is shuffled:
        if shuffle == "none":
            raise UserError("the DataLoader of train shuffles, and data.shuffle is none", "set data.shuffle: full")
        return None
    return None if found is in_order and shuffle == "none" else found


def order_of(loader: data.DataLoader[Any]) -> Sampler | None:
    """The order of the loader's sampler as a function of the epoch; None for unknown samplers."""
    sampler: Any = loader.sampler
    kind = type(sampler)
    if kind is data.SequentialSampler:
        return in_order
    if kind is data.DistributedSampler:
        return shuffled if sampler.shuffle else in_order
    if kind is data.RandomSampler:
        whole = len(sampler.data_source)
        if not sampler.replacement and sampler.num_samples == whole:
            return shuffled
        return WeightedSampler(np.ones(whole), sampler.num_samples, sampler.replacement)
    if kind is data.WeightedRandomSampler:
        return WeightedSampler(host(sampler.weights), sampler.num_samples, sampler.replacement)
    if kind is data.SubsetRandomSampler:
        return partial(shuffled_subset, list(sampler.indices))
    return None


def in_order(epoch: Epoch) -> Ints:
    """All samples in order."""
    return np.arange(epoch.num_samples)


def shuffled(epoch: Epoch) -> Ints:
    """All samples, shuffled differently each epoch."""
    return epoch.rng.permutation(epoch.num_samples)


def shuffled_subset(indices: list[int], epoch: Epoch) -> Ints:
    """Some samples, shuffled differently each epoch."""
    return epoch.rng.permutation(np.array(indices, np.int64))


def example_of(dataset: Any) -> Any:
    """Returns the dataset's first sample. Raises UserError if it has no random access."""
    if isinstance(dataset, data.IterableDataset):
        fix = "leave collate_fn out of it, and give TorchTask(collate=...)"
        raise UserError("a DataLoader of an IterableDataset has a collate_fn", fix)
    with kept_random_state():
        return dataset[0]


@dataclass(eq=False)
class Collate:
    """A DataLoader's collate_fn as a task's: passes samples in the dataset's form, and names the returned tensors."""

    function: Callable[[list[Any]], Any]
    example: Any

    def __repr__(self) -> str:
        return f"the DataLoader's collate_fn {self.function!r} (workers need TorchTask(collate=...) instead)"

    def __call__(self, samples: list[dict[str, Any]]) -> Sample:
        """Makes one batch of arrays.

        Raises:
            UserError: the function returns something other than tensors, or a different number of parts.
        """
        made = self.function([self.as_given(sample) for sample in samples])
        if isinstance(made, Mapping):
            return {name: np.asarray(host(value)) for name, value in made.items()}
        parts = tuple(made) if isinstance(made, (tuple, list)) else (made,)
        if len(parts) != len(samples[0]) or not all(isinstance(part, (torch.Tensor, np.ndarray)) for part in parts):
            what = f"the DataLoader's collate_fn returns {len(parts)} parts for samples with {', '.join(samples[0])}"
            raise UserError(what, "return a tensor for each part of a sample, or a dict of tensors")
        return named(tuple(map(host, parts)), tuple(samples[0]))

    def as_given(self, sample: Mapping[str, Any]) -> Any:
        """Converts a sample to the form in which the dataset returns it."""
        if isinstance(self.example, Mapping):
            return {name: as_kind(value, self.example.get(name)) for name, value in sample.items()}
        if isinstance(self.example, (tuple, list)):
            return tuple(map(as_kind, sample.values(), self.example))
        return as_kind(next(iter(sample.values())), self.example)


def as_kind(value: Any, example: Any) -> Any:
    """Converts an array to the type of the example: tensor, list, tuple, number or array."""
    if isinstance(example, torch.Tensor):
        return torch.as_tensor(value)
    if isinstance(example, (list, tuple)):
        items = np.asarray(value).tolist()
        return items if isinstance(example, list) else tuple(items)
    return np.asarray(value).item() if isinstance(example, (int, float)) else value
