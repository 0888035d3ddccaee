"""Damage that shows up while a program takes parts: an older checkpoint replaces all of them, or none is used."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpctrain.checkpoint.format.layout import DamagedCheckpoint
from hpctrain.checkpoint.reading import Loaded
from hpctrain.checkpoint.store import CheckpointStore

Store = Callable[..., CheckpointStore]


@pytest.fixture
def store_of(tmp_path: Path) -> Store:
    """Makes a store whose checkpoint of step n, from 1 on, holds tensors of these names, n in all of them."""

    def make(*names: str) -> CheckpointStore:
        store = CheckpointStore(tmp_path)
        for step, each in enumerate(names, start=1):
            store.save({f"model/{name}": np.full(1000, float(step)) for name in each}, step=step)
        store.close()
        return store

    return make


def damage(store: CheckpointStore, step: int, name: str) -> None:
    """Changes a byte of a tensor."""
    (shard,) = store.manifest(step).shards
    (offset,) = [stored.offset for stored in shard.pieces if stored.piece.tensor.name == f"model/{name}"]
    path = store.folder(step) / shard.file
    data = bytearray(path.read_bytes())
    data[offset + 100] ^= 1
    path.write_bytes(data)


class Program:
    """Takes tensor by tensor into memory of its own."""

    def __init__(self) -> None:
        self.held: dict[str, float] = {}
        self.offered: list[int] = []

    def take(self, loaded: Loaded) -> dict[str, Any]:
        self.offered.append(loaded.step)
        for name in loaded.arrays:
            self.held[name] = float(loaded.arrays[name].mean())
        return {}


def test_an_older_one_replaces_what_was_taken(store_of):
    store, program = store_of("ab", "ab", "ab"), Program()
    damage(store, 3, "b")
    damage(store, 2, "b")
    loaded = store.load_into(program.take)
    assert program.offered == [3, 2, 1] and program.held == {"model/a": 1.0, "model/b": 1.0}
    assert loaded.step == 1 and [one.step for one in loaded.rejected] == [3, 2]
    assert "the checksum of model/b does not match" in loaded.rejected[0].reason


def test_what_an_older_one_would_not_replace_is_verified_before_it_is_taken(store_of):
    store, program = store_of("ab", "abc"), Program()
    damage(store, 2, "b")
    assert store.load_into(program.take).step == 1
    assert program.offered == [1] and program.held.keys() == {"model/a", "model/b"}


def test_leftovers_of_a_damaged_one_are_never_mixed_with_an_older_one(store_of):
    store, program = store_of("ab", "abc", "abc"), Program()
    damage(store, 3, "c")
    damage(store, 2, "c")
    with pytest.raises(DamagedCheckpoint, match="model/c") as error:
        store.load_into(program.take)
    assert "rename the folders" in error.value.fix and program.offered == [3]
    store.put_aside(3, "damaged")
    assert store.load_into(program.take).step == 1 and program.offered == [3, 1]


def test_a_sound_one_is_read_once(store_of, monkeypatch):
    store, read, real = store_of("ab", "ab"), [], os.preadv

    def preadv(descriptor, views, offset):
        read.append(len(views[0]))
        return real(descriptor, views, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    store.load_into(Program().take)
    assert sum(read) == store.manifest(2).num_bytes
