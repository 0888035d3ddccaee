"""Checkpoints of format 1, in tests/support/format_1, are read for good."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest

from hpctrain.checkpoint.format.layout import DamagedCheckpoint
from hpctrain.checkpoint.store import CheckpointStore
from hpctrain.checkpoint.verify import verify_checkpoint
from tests.support.command import PROJECT

OLD = PROJECT / "tests/support/format_1"
RUNS = ["torch", "keras"]


def by_h5py(folder: Path) -> dict[str, np.ndarray]:
    """Replicated tensors, as the page on checkpoints of that version told people to read them."""
    arrays: dict[str, np.ndarray] = {}
    for shard in json.loads((folder / "manifest.json").read_text())["manifest"]["shards"]:
        with h5py.File(folder / shard["file"]) as file:
            for tensor in shard["tensors"]:
                if tensor["rank"] is None:
                    values, (begin, end) = file[tensor["name"]][...], tensor["rows"]
                    whole = arrays.setdefault(tensor["name"], np.empty(tensor["shape"], values.dtype))
                    np.atleast_1d(whole)[begin:end] = values
    return arrays


@pytest.mark.parametrize("run", RUNS)
def test_all_of_it_is_read(run: str) -> None:
    store = CheckpointStore(OLD / run / "checkpoints")
    expected = by_h5py(store.folder(6))
    loaded = store.load()
    assert (loaded.step, loaded.ranks) == (6, 2)
    splits = [stored.piece for shard in store.manifest(6).shards for stored in shard.pieces]
    assert any(piece.shape != piece.tensor.shape for piece in splits), "rows are split over the shards"
    with store.opened(6) as opened:
        for name, array in expected.items():
            np.testing.assert_array_equal(loaded.arrays[name], array)
            np.testing.assert_array_equal(opened.arrays[name], array)
            half = tuple(length // 2 for length in array.shape)
            part = tuple(slice(length // 2, length) for length in array.shape)
            rest = tuple(length - length // 2 for length in array.shape)
            np.testing.assert_array_equal(opened.arrays.part(name, half, rest), array[part])
    assert verify_checkpoint(store, 6).problems == ()


def test_any_changed_byte_is_found(tmp_path: Path) -> None:
    folder = shutil.copytree(OLD / "torch" / "checkpoints", tmp_path / "checkpoints")
    store, rng = CheckpointStore(folder), np.random.default_rng(0)
    for path in sorted(store.folder(6).iterdir()):
        original = path.read_bytes()
        for at in rng.integers(0, len(original), 60).tolist():
            data = bytearray(original)
            data[at] ^= 1
            path.write_bytes(data)
            with pytest.raises(DamagedCheckpoint):
                store.load(6)
            with pytest.raises(DamagedCheckpoint):
                store.load_into(lambda loaded: dict(loaded.arrays), 6)
        path.write_bytes(original)
    assert store.load().step == 6
