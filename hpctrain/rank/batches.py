"""Makes this rank's batches of training and validation data, and the first batches, on which a task is tried."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

from hpctrain.comm.world import World
from hpctrain.data.dataset import Dataset, Samples
from hpctrain.data.order import Order, first_draw, part_of
from hpctrain.data.pipeline import BatchSource, TrainingData, ValidationData
from hpctrain.data.samples import make_batch
from hpctrain.data.stream import Stream, StreamingData, StreamOrder
from hpctrain.rank.problem import Problem, examples_of
from hpctrain.tasks.mean_check import MOST_SAMPLES
from hpctrain.train.framework import StepResult, samples_of
from hpctrain.train.hooks import BaseHook, Training
from hpctrain.train.loop import other_samples

Place: TypeAlias = Callable[[Samples], Samples]
"""Puts a batch into memory from which it reaches the device fastest."""
TRIED_SAMPLES = 32
"""Maximum number of samples taken from each validation set for the trial."""


def first_batch(problem: Problem, world: World, most: int | None = None) -> Samples:
    """Returns this rank's first micro-batch, at most ``most`` samples; empty if the first batch has none for it."""
    loading = problem.loading
    order = problem.order
    examples = examples_of(problem.train, MOST_SAMPLES)
    ids = order.batch_indices(0, 0) if isinstance(order, Order) else np.arange(order.global_batch)
    mine = ids[part_of(len(ids), world.data.rank, world.data.size)]
    micro_batches = min(loading.micro_batches, max(len(mine), 1))
    mine = mine[part_of(len(mine), 0, micro_batches)][:most]
    if isinstance(order, StreamOrder):
        mine = np.arange(min(len(mine), len(examples)))
    return make_batch(examples, loading.recipe, first_draw(mine))


def first_pair(problem: Problem, batch: Samples) -> Samples | None:
    """Returns two samples if the first micro-batch has only one, which does not show how a loss averages."""
    if not batch or samples_of(batch) > 1:
        return None
    examples, order = examples_of(problem.train, 2), problem.order
    ids = order.batch_indices(0, 0)[:2] if isinstance(order, Order) else np.arange(min(2, len(examples)))
    try:
        return make_batch(examples, problem.loading.recipe, first_draw(ids))
    except Exception:  # of a collate for single samples
        return None


def first_validation(problem: Problem) -> list[Samples]:
    """Returns one batch from each validation set: its first samples, at most TRIED_SAMPLES, the same on all ranks."""
    loading, batches = problem.loading, []
    for dataset in problem.validation.values():
        count = min(loading.validation_batch, len(dataset), TRIED_SAMPLES)
        batches.append(make_batch(dataset, loading.validation_recipe, first_draw(np.arange(count))))
    return list(filter(None, batches))


def make_validation(problem: Problem, world: World, dataset: Dataset, place: Place) -> ValidationData:
    """Returns this rank's part of a validation set."""
    loading, group = problem.loading, world.data
    sizes = (loading.validation_batch, group.rank, group.size, loading.prefetch_batches)
    return ValidationData(dataset, *sizes, loading.validation_recipe, place)


def make_validation_sets(problem: Problem, world: World, place: Place) -> dict[str, ValidationData]:
    """Returns this rank's part of each validation set, by name."""
    return {name: make_validation(problem, world, dataset, place) for name, dataset in problem.validation.items()}


def make_data(problem: Problem, world: World, place: Place) -> BatchSource:
    """Returns the source of this rank's part of each global batch."""
    loading = problem.loading
    rank = world.data.rank
    size = world.data.size
    common: dict[str, Any] = {"accumulate": loading.micro_batches, "prefetch": loading.prefetch_batches}
    common |= {"recipe": loading.recipe, "place": place}
    if isinstance(problem.train, Stream):
        assert isinstance(problem.order, StreamOrder), "make_problem gives a stream its order"
        return StreamingData(problem.train, problem.order, rank, size, **common)
    assert isinstance(problem.order, Order), "make_problem gives a dataset its order"
    return TrainingData(problem.train, problem.order, rank, size, workers=loading.workers, **common)


class DataPosition(BaseHook):
    """Saves and restores the position in the data; has no state if (epoch, batch) is enough.

    Also compares batches of a stream between ranks: the first, the second, the fourth, and so on; and warns once of a
    stream that has changed since the checkpoint was saved.
    """

    name = "data"

    def __init__(self, data: BatchSource, warn: Callable[[str], object]) -> None:
        self.data, self.warn, self.has_warned = data, warn, False

    def after_step(self, training: Training, result: StepResult) -> None:
        changed = getattr(self.data, "changed", "")
        digest = getattr(self.data, "digest", "")
        if changed and not self.has_warned:
            self.has_warned = True
            if training.world.rank == 0:
                self.warn(changed)
        if digest:
            found = training.world.everyone.allgather(digest, "compare a batch of their streams")
            if any(each != found[0] for each in found):
                raise other_samples(found, training.state.step)

    def state_dict(self) -> Mapping[str, Any]:
        return self.data.state_dict()

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self.data.load_state_dict(saved)
