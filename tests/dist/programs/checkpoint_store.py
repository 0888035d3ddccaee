"""Ranks that use a checkpoint store without a trainer: checkpoint_store.py <mode> <folder> ..."""

from __future__ import annotations

import dataclasses
import os
import resource
import sys
import time
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np

from hpctrain.checkpoint import saver as saver_module
from hpctrain.checkpoint.hook import writers as writing_ranks
from hpctrain.checkpoint.reading import Loaded
from hpctrain.checkpoint.saver import Saver, array_tensors
from hpctrain.checkpoint.store import CheckpointStore, open_saver
from hpctrain.comm.group import Group
from hpctrain.comm.world import World, connect
from hpctrain.errors import UserError
from hpctrain.train.saved_arrays import SavedArrays
from hpctrain.train.state import ArrayTensor, Cut, Placement, Tiling


def arrays(value: float) -> dict[str, np.ndarray]:
    """The same on all ranks: one tensor that is sharded by rows, many small ones, a scalar."""
    large = np.arange(3_000_000, dtype=np.float32).reshape(3000, 1000) + value
    return {"model/large": large, **{f"model/small{i}": np.full(i, value) for i in range(50)}, "count": np.int64(value)}


def own(rank: int, value: float) -> dict[str, np.ndarray]:
    """Values that differ on each rank."""
    return {
        "rng/state": np.full(5, rank, np.uint8),
        "model/mean": np.full(3, rank + value, np.float32),
        "seen": np.int64(rank),
    }


def save(world: World, folder: Path, writers: str) -> None:
    """Save steps 1 and 2; ``two-nodes``: as if the upper half of the ranks were on another node."""
    store = CheckpointStore(folder, group=world.everyone)
    if writers == "two-nodes":
        half = Group("local", world.everyone.comm.Split(2 * world.rank // world.size))
        world, writers = dataclasses.replace(world, local=half), "node"
    store.saver = open_saver(store, writing_ranks(writers, world))
    for step in (1, 2):
        store.save(arrays(step), {"step": step}, step, own(world.rank, step))
    store.close()


def load(world: World, folder: Path, saved_ranks: str, step: str) -> None:
    """Check what every rank loads."""
    store = CheckpointStore(folder, group=world.everyone)
    loaded = store.load()
    assert loaded.step == int(step) and loaded.ranks == int(saved_ranks), loaded.step
    for name, array in arrays(loaded.step).items():
        np.testing.assert_array_equal(loaded.arrays[name], array)
    if world.size == loaded.ranks:
        for name, array in own(world.rank, loaded.step).items():
            np.testing.assert_array_equal(loaded.arrays[name], array)
    else:
        mean = (loaded.ranks - 1) / 2 + loaded.step
        np.testing.assert_allclose(loaded.arrays["model/mean"], np.full(3, mean, np.float32))
        assert loaded.arrays["seen"] == world.rank % loaded.ranks
        assert "rng/state" not in loaded.arrays
    reasons = world.everyone.allgather([one.reason for one in loaded.rejected], "compare")
    assert all(one == reasons[0] for one in reasons)
    if world.rank == 0:
        print("loaded", loaded.step, *[one.reason for one in loaded.rejected])


def train(saver: Saver, world: World, tensors: list, step: int) -> saver_module.SaveResult:
    """Save while steps continue; the outcome, which is the same on all ranks and at the same step."""
    saver.begin(tensors, step, {})
    for number in range(100_000):
        outcome = saver.poll()
        if outcome:
            numbers = world.everyone.allgather(number, "compare the step")
            assert len(set(numbers)) == 1, numbers
            return outcome
    raise AssertionError("the save never ended")


def limited(world: World, folder: Path) -> None:
    """A file-size limit on rank 1 only."""
    store = CheckpointStore(folder, group=world.everyone)
    saver = open_saver(store)
    first = train(saver, world, array_tensors(arrays(1), {}), 1)
    assert first.error is None
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if world.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    second = train(saver, world, array_tensors(arrays(2), {}), 2)
    assert second.error and second.error.startswith("rank 1: "), second.error
    if world.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert store.steps() == [1] and (world.rank or os.listdir(folder) == ["step-000000001"]), os.listdir(folder)
    world.everyone.barrier("look at the folder before anybody begins the next one")
    third = train(saver, world, array_tensors(arrays(3), {}), 3)
    assert third.error is None
    saver.close()
    if world.rank == 0:
        print("survived:", second.error)


def full(world: World, folder: Path) -> None:
    """A disk with room for one checkpoint, not two; the check for free space is off."""
    saver_module.LEAST_SPARE_BYTES = -(1 << 40)
    store = CheckpointStore(folder, group=world.everyone)
    saver = open_saver(store)
    assert train(saver, world, array_tensors(arrays(1), {}), 1).error is None
    outcome = train(saver, world, array_tensors(arrays(2), {}), 2)
    assert outcome.error and "No space left on device" in outcome.error, outcome.error
    saver.close()
    world.everyone.barrier("look at the folder")
    if world.rank == 0:
        assert os.listdir(folder) == ["step-000000001"], os.listdir(folder)
        print("survived:", outcome.error)
    loaded = store.load()
    np.testing.assert_array_equal(loaded.arrays["model/large"], arrays(1)["model/large"])


def dropped(world: World, folder: Path) -> None:
    """Drop a checkpoint that rank 1 has not written; the one waiting behind it takes its place."""
    free = Event()

    class Held(CheckpointStore):
        def prepare_folder(self, partial: Path) -> None:
            assert world.rank == 0 or free.wait(120)
            super().prepare_folder(partial)

    store = Held(folder, group=world.everyone)
    saver = open_saver(store)
    for step in (1, 2, 3):
        saver.begin(array_tensors(arrays(step), {}), step, {})
    saver.drop(wanted=())
    free.set()
    first, second = saver.finish(), saver.finish()
    assert first.is_dropped and first.error and not first.is_final, first
    assert second.error is None and saver.idle, second
    saver.close()
    world.everyone.barrier("look at the folder")
    assert store.steps() == [3], "3 has taken the place of 2"
    np.testing.assert_array_equal(store.load().arrays["model/large"], arrays(3)["model/large"])
    if world.rank == 0:
        print("dropped", os.listdir(folder))


WHOLE = {"model/up": (600, 1024), "model/down": (1024, 600), "model/embed": (5, 7, 3), "model/rest": (1, 4)}
AXIS = {"model/up": 1, "model/down": 0, "model/embed": 2, "model/rest": 0}
"""Axis along which each tensor is sharded."""


def whole(name: str) -> np.ndarray:
    """All values of a sharded tensor."""
    shape = WHOLE[name]
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def part_of(name: str, index: int, parts: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offset and shape of one of several parts of about equal size."""
    shape, axis = WHOLE[name], AXIS[name]
    begin, end = shape[axis] * index // parts, shape[axis] * (index + 1) // parts
    place = tuple(begin if each == axis else 0 for each in range(len(shape)))
    return place, tuple(end - begin if each == axis else length for each, length in enumerate(shape))


def save_cut(world: World, folder: Path, parts: str) -> None:
    """Save sharded tensors, replicated over ranks if there are fewer parts than ranks, and replicated ones."""
    count = int(parts)
    store = CheckpointStore(folder, group=world.everyone)
    saver = open_saver(store)
    parts_here = []
    for name in WHOLE:
        begin, shape = part_of(name, world.rank % count, count)
        slices = tuple(slice(first, first + length) for first, length in zip(begin, shape, strict=True))
        cut = Cut(WHOLE[name], begin, world.rank // count, world.size // count)
        parts_here.append(ArrayTensor(name, np.ascontiguousarray(whole(name)[slices]), Placement.CUT, cut=cut))
    tensors = [*array_tensors({"model/bias": np.arange(9.0)}, own(world.rank, 1)), *parts_here]
    tiled = [dataclasses.replace(it, tiling=Tiling(1)) if it.name == "model/up" else it for it in tensors]
    saver.begin(tiled, 1, {})
    saver.finish().path_or_raise()
    wrong = Cut((8, 2), (0, 0))  # all ranks claim the first rows
    saver.begin([ArrayTensor("model/w", np.ones((4, 2)), Placement.CUT, cut=wrong)], 2, {})
    outcome = saver.finish()
    assert outcome.error and "model/w: parts overlap" in outcome.error, outcome
    saver.close()
    store.close()
    assert store.steps() == [1]
    if world.rank == 0:
        sizes = [entry.stat().st_size for entry in sorted((folder / "step-000000001").glob("*.h5"))]
        print("saved", max(sizes) - min(sizes) < 100_000)


def load_cut(world: World, folder: Path) -> None:
    """Each rank reads a different part than any rank saved, and no more bytes than that."""
    read, real = [0], os.preadv

    def preadv(descriptor: int, views: Any, offset: int, flags: int = 0) -> int:
        count = real(descriptor, views, offset, flags)
        read[0] += count
        return count

    def use(loaded: Loaded) -> dict[str, np.ndarray]:
        arrays = loaded.arrays
        assert isinstance(arrays, SavedArrays)
        os.preadv, read[0] = preadv, 0
        for name in WHOLE:
            begin, shape = part_of(name, world.rank, world.size)
            slices = tuple(slice(first, first + length) for first, length in zip(begin, shape, strict=True))
            np.testing.assert_array_equal(arrays.part(name, begin, shape), whole(name)[slices])
        os.preadv = real
        return {"model/bias": arrays["model/bias"]}

    store = CheckpointStore(folder, group=world.everyone)
    loaded = store.load_into(use)
    assert loaded.arrays["model/bias"].tolist() == list(range(9))
    for name in WHOLE:
        np.testing.assert_array_equal(store.load().arrays[name], whole(name))
    total = sum(whole(name).nbytes for name in WHOLE)
    if world.size > 1:
        refuse_on_one(store, world)
    most = world.everyone.allgather(read[0], "compare what was read")
    if world.rank == 0:
        print("read", max(most) / total)


def refuse_on_one(store: CheckpointStore, world: World) -> None:
    """An error of the program on one rank: all ranks end, and the others say which rank it was."""

    def use(loaded: Loaded) -> dict[str, np.ndarray]:
        if world.rank == 1:
            raise KeyError("head.weight")
        return {}

    begin = time.monotonic()
    try:
        store.load_into(use)
    except (KeyError, UserError) as error:
        told = str(error)
    assert time.monotonic() - begin < 60
    assert "head.weight" in told and (world.rank == 1 or "rank 1 failed while it loaded" in told), told


if __name__ == "__main__":
    mode, path, *rest = sys.argv[1:]
    modes = {"save": save, "load": load, "limited": limited, "full": full, "dropped": dropped}
    (modes | {"save-cut": save_cut, "load-cut": load_cut})[mode](connect(), Path(path), *rest)
