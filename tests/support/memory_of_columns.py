"""Measure reading checkpoints whose layers plans cut along either axis: memory_of_columns.py <folder>.

A state of 64 MB in few or in hundreds of tensors, half weights and half optimizer state, is saved under some plans and
read under others. Prints JSON: for each reader, bytes read from files relative to the bytes it needs, and its peak
extra memory in MiB.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from hpctrain.checkpoint.format.boxes import Box, everything
from hpctrain.checkpoint.saver import Saver
from hpctrain.checkpoint.store import CheckpointStore
from hpctrain.comm.group import Group
from hpctrain.train.state import Cut, Placement, Tiling
from tests.support.memory_of_plans import Memory, take
from tests.support.memory_of_reading import measured

STATES = {"few": (12, (444, 3008)), "hundreds": (240, (264, 256))}
"""Number of tensors, and the shape of each; in the large ones no block ends at the end of a row."""
Plan = tuple[int, Callable[[int, int, int, tuple[int, ...]], Box]]
"""Number of ranks, and a function (rank, tensor number, number of tensors, shape) -> the rank's part of a tensor.

Odd layers are cut along axis 1; the second half of the tensors is optimizer state."""


def whole(rank: int, number: int, count: int, shape: tuple[int, ...]) -> Box:
    """Each rank holds the whole tensor."""
    return everything(shape)


def layers(ranks: int) -> Plan:
    """The plan of ``parallel.tensor``."""

    def part(rank: int, number: int, count: int, shape: tuple[int, ...]) -> Box:
        length = -(-shape[number % 2] // ranks)
        columns = Box((0, rank * length), (shape[0], length))
        rows = Box((rank * length, 0), (length, shape[1]))
        return (columns if number % 2 else rows).overlap(everything(shape))

    return ranks, part


def optimizer(ranks: int) -> Plan:
    """The plan of ``parallel.shard: optimizer``, which splits optimizer state by ranges of rows."""

    def part(rank: int, number: int, count: int, shape: tuple[int, ...]) -> Box:
        if number < count // 2:
            return everything(shape)
        rows = shape[0] * count // 2
        before = (number - count // 2) * shape[0]
        first, last = rows * rank // ranks - before, rows * (rank + 1) // ranks - before
        return Box((first, 0), (last - first, shape[1])).overlap(everything(shape))

    return ranks, part


PLANS: dict[str, Plan] = {
    "data 1": (1, whole),
    "data 2": (2, whole),
    "data 4": (4, whole),
    "tensor 2": layers(2),
    "tensor 4": layers(4),
    "shard 4": optimizer(4),
}
READERS = {
    "data 1": ("data 1", "tensor 2", "tensor 4"),
    "data 2": ("tensor 2", "tensor 4"),
    "data 4": ("tensor 2", "tensor 4", "shard 4"),
    "tensor 2": ("data 1", "tensor 4", "shard 4"),
    "tensor 4": ("tensor 2",),
    "shard 4": ("data 1", "tensor 2", "tensor 4"),
}
"""Plans that read a checkpoint, by the plan that saved it."""


class Rank(Group):
    """A group with a rank and a size, but without communication."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__("some")
        self.rank, self.size = rank, size


def values_of(number: int, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Values of a tensor."""
    return np.random.default_rng(number).random(shape, dtype=np.float32)


def held(plan: Plan, rank: int, count: int, shape: tuple[int, ...], is_saved: bool = False) -> list[Memory]:
    """A rank's parts of all tensors: with their values, or as touched memory to read into."""
    tensors = []
    for number in range(count):
        box = plan[1](rank, number, count, shape)
        if not box.size:
            continue
        array = values_of(number, shape)[box.index] if is_saved else np.ones(box.shape, np.float32)
        tensor = Memory(f"model/{number}", array, tiling=Tiling(number % 2))
        if any(plan[1](other, number, count, shape) != box for other in range(plan[0])):
            tensor = replace(tensor, placement=Placement.CUT, cut=Cut(shape, box.begin))
        tensors.append(tensor)
    return tensors


def save(store: CheckpointStore, step: int, plan: Plan, count: int, shape: tuple[int, ...]) -> None:
    """Save as the plan's ranks do, one after another."""
    for rank in range(plan[0]):
        own = CheckpointStore(store.path, group=Rank(rank, plan[0]), peers=Group("data"))
        saver = Saver(own, range(plan[0]), "plans")
        saver.begin(held(plan, rank, count, shape, is_saved=True), step, {})
        assert saver.job is not None
        saver.job.future.result()
        partial_folder = saver.job.partial
        saver.close()
    store.commit(partial_folder, step, plan[0], {}, looks_through=True, owners=1)


def require_right(tensors: list[Memory], shape: tuple[int, ...]) -> None:
    """Check that all values are the saved ones."""
    for tensor in tensors:
        saved, begin = values_of(int(tensor.name.rpartition("/")[2]), shape), tensor.cut.begin if tensor.cut else (0, 0)
        assert np.array_equal(tensor.value, saved[Box(begin, tensor.shape).index]), tensor.name


def found_by(store: CheckpointStore, step: int, plan: Plan, count: int, shape: tuple[int, ...]) -> tuple[float, float]:
    """Measure the plan's last but one rank: bytes read relative to those needed, and extra memory in MiB."""
    tensors = held(plan, max(0, plan[0] - 2), count, shape)
    take(store, step, tensors)  # so that imports and caches are not counted
    require_right(tensors, shape)
    num_bytes, more = measured(partial(take, store, step, tensors))
    return num_bytes / sum(tensor.value.nbytes for tensor in tensors), more / 2**20


if __name__ == "__main__":
    store = CheckpointStore(sys.argv[1])
    found = {}
    for step, (kind, plan) in enumerate((kind, plan) for kind in STATES for plan in READERS):
        child = os.fork()  # so that the reader does not reuse memory freed by the writer
        if not child:
            save(store, step, PLANS[plan], *STATES[kind])
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        for reader in READERS[plan]:
            found[f"{kind}: {plan} to {reader}"] = found_by(store, step, PLANS[reader], *STATES[kind])
        store.remove(step)
    print(json.dumps(found))
