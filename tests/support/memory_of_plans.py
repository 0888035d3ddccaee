"""Measure how ranks of different plans read large checkpoints: memory_of_plans.py <folder>; prints a line of JSON.

A state of 128 MB, in few tensors or in 5,000, is written as by two ranks that cut half of the tensors by rows and half
by columns. For each reader: bytes read from files relative to those it needs, peak extra memory in MiB, and seconds.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.backends.named_state import load_tensors
from hpctrain.checkpoint import verify
from hpctrain.checkpoint.export import export_safetensors
from hpctrain.checkpoint.reading import Loaded
from hpctrain.checkpoint.store import CheckpointStore
from hpctrain.train.state import ArrayTensor, Cut, Placement
from tests.support.checkpoint_of_plan import parts_of, write_shards
from tests.support.memory_of_reading import measured

STATE_BYTES, WIDTH = 128_000_000, 128
KINDS = {"few": 8, "5,000": 5000}


class Memory(ArrayTensor):
    """A tensor in memory that values can be loaded into."""

    @contextmanager
    def loading(self) -> Iterator[Callable[[NDArray[Any], int], None]]:
        """See Assignable."""

        def load(rows: NDArray[Any], first_row: int) -> None:
            self.value[first_row : first_row + len(rows)] = rows

        yield load


def shape_of(count: int) -> tuple[int, int]:
    """Shape of each of ``count`` tensors; in the large ones no block ends at the end of a row."""
    width = WIDTH if count > 100 else 3001
    return STATE_BYTES // count // 4 // width, width


def save(store: CheckpointStore, count: int) -> None:
    """Save a checkpoint as two ranks do; its step is the number of tensors."""
    rng = np.random.default_rng(count)
    shards: list[list[Any]] = [[], []]
    for number in range(count):
        values = rng.random(shape_of(count), dtype=np.float32)
        for shard, part in zip(shards, parts_of(f"model/{number}", values, number % 2, 2), strict=True):
            shard.append(part)
    write_shards(store, count, shards)


def held(count: int, is_mine: Callable[[int], bool], axis: Callable[[int], int | None]) -> list[Memory]:
    """Touched memory of a rank for half or all of each tensor that it holds."""
    tensors = []
    for number in filter(is_mine, range(count)):
        whole, along = shape_of(count), axis(number)
        shape = tuple(length // 2 if each == along else length for each, length in enumerate(whole))
        cut = None if along is None else Cut(whole, (0, 0))
        placement = Placement.REPLICATED if cut is None else Placement.CUT
        tensors.append(Memory(f"model/{number}", np.ones(shape, np.float32), placement, cut=cut))
    return tensors


def take(store: CheckpointStore, step: int, tensors: list[Memory]) -> None:
    """Load a checkpoint into tensors as a framework does."""

    def use(loaded: Loaded) -> dict[str, NDArray[Any]]:
        load_tensors(tensors, loaded.arrays)
        return {}

    store.load_into(use, step)


def export(store: CheckpointStore, step: int) -> None:
    """Export to a safetensors file."""
    with store.opened(step) as loaded:
        export_safetensors(loaded, store.path / "out.safetensors")


def readers_of(store: CheckpointStore, count: int) -> dict[str, tuple[Callable[[], Any], int]]:
    """Readers of the checkpoint with ``count`` tensors, each with the number of bytes it needs."""
    plans = {
        "the same plan": held(count, lambda number: True, lambda number: number % 2),
        "a stage": held(count, lambda number: number < count // 2, lambda number: None),
        "one process": held(count, lambda number: True, lambda number: None),
    }
    return {
        **{
            name: (partial(take, store, count, tensors), sum(one.value.nbytes for one in tensors))
            for name, tensors in plans.items()
        },
        "verify": (lambda: verify.verify_checkpoint(store, count), STATE_BYTES),
        "export": (lambda: export(store, count), STATE_BYTES),
    }


if __name__ == "__main__":
    folder = CheckpointStore(sys.argv[1])
    child = os.fork()  # so that the readers do not reuse memory freed by the writer
    if not child:
        for number in KINDS.values():
            save(folder, number)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    found: dict[str, tuple[float, float, float]] = {}
    for kind, number in KINDS.items():
        for name, (reader, size) in readers_of(folder, number).items():
            begin = time.perf_counter()
            reader()  # so that imports and caches are not counted
            seconds = time.perf_counter() - begin
            num_bytes, more = measured(reader)
            found[f"{kind}: {name}"] = num_bytes / size, more / 2**20, seconds
    print(json.dumps(found))
