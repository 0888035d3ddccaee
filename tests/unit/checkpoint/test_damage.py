"""A checkpoint folder under attack: whatever is wrong is found before libhdf5 sees a file; see test_corruptions.py."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from hpctrain.checkpoint.format import shard as shard_module
from hpctrain.checkpoint.store import CheckpointStore
from hpctrain.checkpoint.verify import verify_checkpoint
from hpctrain.comm.group import Group
from tests.support.checkpoint_of_plan import forge_manifest

BLOCK_BYTES = 1024
"""So that large tensors have several checksums here."""


def state(value: float) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(int(value))
    widths = [*range(1, 20), 400]
    return {
        f"model/layer{index}/weight": rng.random((9, width), dtype=np.float32) for index, width in enumerate(widths)
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints, of steps 1 and 2."""
    folder = tmp_path_factory.mktemp("saved")
    store = CheckpointStore(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_module, "SUMMED_BYTES", BLOCK_BYTES)
        for step in (1, 2):
            store.save(state(step), step=step)
    store.close()
    return folder


@pytest.fixture
def store(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CheckpointStore]:
    """A copy of them; libhdf5 must not be asked."""
    shutil.copytree(saved, tmp_path / "checkpoints")
    monkeypatch.setattr(h5py, "File", None)
    yield CheckpointStore(tmp_path / "checkpoints", group=Group("alone"))


def resumes_from_1(store: CheckpointStore) -> None:
    loaded = store.load()
    assert loaded.step == 1 and [one.step for one in loaded.rejected] == [2]
    for name, array in state(1).items():
        np.testing.assert_array_equal(loaded.arrays[name], array)


def test_swapped_and_missing_files(store):
    shard, manifest = "shard-00000-of-00001.h5", "manifest.json"
    for name in (shard, manifest):
        original = (store.folder(2) / name).read_bytes()
        (store.folder(2) / name).write_bytes((store.folder(1) / name).read_bytes())
        resumes_from_1(store)
        (store.folder(2) / name).write_bytes(original)
    os.unlink(store.folder(2) / shard)
    resumes_from_1(store)
    os.unlink(store.folder(2) / manifest)
    resumes_from_1(store)
    shutil.rmtree(store.folder(2))
    store.folder(2).write_text("a file in place of the folder")
    resumes_from_1(store)


@pytest.mark.parametrize(
    "file", ["/etc/hostname", "../step-000000001/shard-00000-of-00001.h5", "../../secret", "/dev/zero"]
)
def test_paths_that_lead_out_are_never_followed(store, tmp_path, file):
    (tmp_path / "secret").write_text("x")
    forge(store, lambda manifest: manifest["shards"][0].update(file=file))
    resumes_from_1(store)
    assert (tmp_path / "secret").read_text() == "x"


def test_an_index_that_says_something_else_than_the_manifest_is_damage(store):
    """All checksums are right."""
    forge(store, lambda manifest: manifest["shards"][0]["tensors"][3].update(rank=0))
    resumes_from_1(store)
    loaded = store.load_into(lambda loaded: dict(loaded.arrays))
    assert loaded.step == 1 and "has an index that differs from the manifest" in loaded.rejected[0].reason


@pytest.mark.parametrize("num_bytes", [0, 1, 2**40, 2**55, 2**80])
def test_absurd_sizes_allocate_nothing(store, num_bytes):
    forge(store, lambda manifest: manifest["shards"][0].update(bytes=num_bytes))
    resumes_from_1(store)


def test_linked_shards_are_not_followed(store, tmp_path):
    shard = store.folder(2) / "shard-00000-of-00001.h5"
    shard.rename(tmp_path / "outside.h5")
    shard.symlink_to(tmp_path / "outside.h5")
    resumes_from_1(store)


def test_verify_says_the_same(store):
    assert verify_checkpoint(store, 1).problems == ()
    shard = store.folder(2) / "shard-00000-of-00001.h5"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert "does not match" in verify_checkpoint(store, 2).problems[0]


def forge(store: CheckpointStore, change: Any) -> None:
    """Changes the manifest of step 2 and gives it a right checksum."""
    forge_manifest(store.folder(2), change)
