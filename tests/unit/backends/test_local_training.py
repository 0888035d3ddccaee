"""Ranks that train apart, as threads with a model of a few numbers: rounds, parts on their way, and resumes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from hpctrain.backends.local_training import ALL, FlatWeights, HostFlatWeights, LocalFramework, covered, inner_world
from hpctrain.backends.torch.flat_weights import TorchFlatWeights
from hpctrain.backends.torch.process_groups import peers_of
from hpctrain.backends.update import UpdateResult
from hpctrain.checkpoint.initial import OfKeras
from hpctrain.comm.group import Group
from hpctrain.comm.world import World
from hpctrain.config.sections import ReduceConfig, SyncConfig
from hpctrain.reduce.reducer_choice import ReducerChoice
from hpctrain.train.state import ArrayTensor, StateTensor, TrainState
from hpctrain.train.stateful import value_of
from tests.support.thread_groups import ThreadGroup, in_threads

RANKS, STEPS = 2, 70
BATCH = [{"x": np.zeros(1)}]
Saved = dict[str, NDArray[Any]]


class Numbers:
    """A framework of numbers that each rank draws to its own place once it is apart; it has a momentum.

    With ``as_tensors`` they are two torch parameters.
    """

    def __init__(self, rank: int, as_tensors: bool) -> None:
        self.rank, self.as_tensors = rank, as_tensors
        self.aim, self.began = np.ones(48), np.zeros(48)
        self.numbers, self.speed = np.zeros(48), np.zeros(48)

    def step(self, micro_batches: Sequence[Any], global_samples: int) -> UpdateResult:
        self.began = self.numbers.copy()
        self.speed = 0.9 * self.speed + 0.01 * (self.aim - self.numbers)
        self.numbers += self.speed
        return UpdateResult({"loss": (0.0, 1.0)})

    def flat_weights(self, group: Group, by_device: Group | None) -> FlatWeights:
        if not self.as_tensors:
            return HostFlatWeights(group, self.weights, self.set_weights)
        peers = peers_of(by_device, torch.device("cpu")) if by_device else None
        return TorchFlatWeights(group, peers, torch.from_numpy(self.numbers).view(6, 8).split(4))

    def weights(self, at: slice = ALL) -> NDArray[Any]:
        return self.numbers[at].copy()

    def set_weights(self, flat: NDArray[Any], at: slice = ALL) -> None:
        self.numbers[at] = flat

    def weights_hash(self, shared_only: bool = False) -> str:
        return self.numbers.tobytes().hex()

    def state(self) -> list[StateTensor]:
        return [ArrayTensor("numbers", self.numbers), ArrayTensor("speed", self.speed)]

    def close(self) -> None:
        """Nothing is open."""

    def load(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        self.numbers[:], self.speed = arrays["numbers"], np.array(arrays["speed"])

    keras_model, dry_call, set_learning_rate = "a model", None, None

    def begin_averages(self) -> None:
        """It has none."""

    def use(self, choice: Any) -> None:
        self.aim = np.random.default_rng(self.rank).normal(size=48)


HOST, TENSORS, PEERS = "arrays", "tensors on the host", "process group"
"""How flat weights are held and exchanged."""


def trained(
    group: ThreadGroup,
    node: int,
    until: int,
    begin: int = 0,
    saved: Saved | None = None,
    way: str = HOST,
    **sync: Any,
) -> Any:
    """The framework after updates, from saved arrays on if there are any."""
    world = World(group, group, group, node=node, nodes=RANKS, host="here")
    config = SyncConfig(kind="local", **{"every_steps": 32, "after_steps": 3, **sync})
    made: Any = Numbers(group.rank, way != HOST)
    apart = ReducerChoice(ReduceConfig(kind="nccl" if way == PEERS else "mpi"), world)
    framework = LocalFramework(made, world, inner_world(world, config), config, apart)
    progress = TrainState(step=begin)
    framework.follow(progress, STEPS)
    if saved is not None:
        framework.load(saved)
    while progress.step < until:
        framework.step(BATCH, 1)
        progress.step += 1
    return framework


def saved_by(framework: LocalFramework) -> Saved:
    return {one.name: value_of(one) for one in framework.state()}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("at", [2, 3, 4, 20, 36, 37, 68])
def test_a_resume_at_any_step_ends_bit_for_bit_the_same_with_equal_weights(overlap, at):
    def work(group):
        straight = trained(group, group.rank, STEPS, overlap=overlap)
        saved = saved_by(trained(group, group.rank, at, overlap=overlap))
        again = trained(group, group.rank, STEPS, at, saved, overlap=overlap)
        return [straight.framework.numbers, again.framework.numbers]

    (first, again), (second, _) = in_threads(RANKS, work)
    np.testing.assert_array_equal(again, first)
    np.testing.assert_array_equal(second, first)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("ways", [(TENSORS, TENSORS), (PEERS, PEERS), (HOST, PEERS), (PEERS, HOST)])
def test_a_process_group_gives_the_bits_and_state_of_the_host(ways, overlap):
    """A run changes from the first of two ways to the second when it resumes."""

    def work(group):
        found = []
        for first, second in ((HOST, HOST), ways):
            before = trained(group, group.rank, 41, way=first, overlap=overlap, outer_lr=0.7)
            after = trained(group, group.rank, STEPS, 41, saved_by(before), way=second, overlap=overlap, outer_lr=0.7)
            found += [saved_by(before), saved_by(after)]
            for one in (before, after):
                one.close()
        return found

    for before, after, *others in in_threads(RANKS, work):
        for saved, other in zip((before, after), others, strict=True):
            assert [*saved] == [*other]
            for name, array in saved.items():
                np.testing.assert_array_equal(other[name], array, strict=True)


def test_parts_under_way_are_forgotten_by_a_resume_with_other_parts():
    def work(group):
        saved = saved_by(trained(group, group.rank, 37, overlap=True, every_steps=8))
        return trained(group, group.rank, STEPS, 37, saved, overlap=True).outer.outer

    one, other = in_threads(RANKS, work)
    np.testing.assert_array_equal(one, other)


def test_outer_weights_begin_at_those_of_a_file_that_keras_loads():
    def work(group):
        framework = trained(group, group.rank, until=0)
        assert isinstance(framework, OfKeras) and framework.keras_model == "a model"
        framework.framework.set_weights(np.ones(48))
        framework.begin_averages()
        return [framework.outer.outer]

    for (outer,) in in_threads(RANKS, work):
        np.testing.assert_array_equal(outer, np.ones(48))


def test_with_overlap_every_part_has_landed_soon_after_a_round():
    def work(group):
        return [trained(group, group.rank, until, overlap=True).outer.outer for until in (3, 36, 37)]

    (begin, before, after), (_, _, other) = in_threads(RANKS, work)
    assert [np.count_nonzero(outer != begin) for outer in (before, after)] == [45, 48], "the last part has 3 numbers"
    np.testing.assert_array_equal(other, after)


def test_ranks_of_a_node_become_equal_if_they_trained_apart_before_a_resume():
    def work(group):
        sync = {"within": "node", "overlap": True}
        apart = trained(group, group.rank, 41, **sync)
        equal = []
        for framework in (apart, trained(group, 0, 42, 41, saved_by(apart), **sync)):
            mine = [one.tolist() for one in (framework.framework.began, saved_by(framework)["sync/ahead"])]
            equal.append(len(set(map(str, group.allgather(mine)))) == 1)
        return equal

    assert in_threads(RANKS, work) == [[False, True]] * RANKS


@pytest.mark.parametrize("at", [ALL, slice(0, 12), slice(1, 9), slice(4, 5), slice(7, 12), slice(3, 3)])
def test_arrays_in_a_row_are_read_and_replaced_by_slices(at):
    sizes = [3, 0, 4, 1, 4]
    row = np.arange(sum(sizes))
    arrays = np.split(row.copy(), np.cumsum(sizes)[:-1])
    read = [arrays[index][part] for index, part, _ in covered(sizes, at)]
    np.testing.assert_array_equal(np.concatenate([row[:0], *read]), row[at])
    flat = -row[at]
    for index, part, place in covered(sizes, at):
        arrays[index][part] = flat[place]
    row[at] = flat
    np.testing.assert_array_equal(np.concatenate(arrays), row)
