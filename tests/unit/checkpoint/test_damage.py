"""A checkpoint folder under attack: whatever is wrong is found before libhdf5 sees a file; see test_corruptions.py."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from hpctrain.checkpoint.format import shard as shard_module
from hpctrain.checkpoint.format.layout import ITEM_TYPES
from hpctrain.checkpoint.format.shard import gaps
from hpctrain.checkpoint.format.shard_index import framed, unframed
from hpctrain.checkpoint.store import CheckpointStore
from hpctrain.checkpoint.verify import how_it_ended, verify_checkpoint
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


def test_swapped_and_missing_files(store: CheckpointStore) -> None:
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
def test_paths_that_lead_out_are_never_followed(store: CheckpointStore, tmp_path: Path, file: str) -> None:
    (tmp_path / "secret").write_text("x")
    forge(store, lambda manifest: manifest["shards"][0].update(file=file))
    resumes_from_1(store)
    assert (tmp_path / "secret").read_text() == "x"


def test_an_index_that_says_something_else_than_the_manifest_is_damage(store: CheckpointStore) -> None:
    """All checksums are right."""
    forge(store, lambda manifest: manifest["shards"][0]["tensors"][3].update(rank=0))
    resumes_from_1(store)
    loaded = store.load_into(lambda loaded: dict(loaded.arrays))
    assert loaded.step == 1 and "has an index that differs from the manifest" in loaded.rejected[0].reason


@pytest.mark.parametrize("num_bytes", [0, 1, 2**40, 2**55, 2**80])
def test_absurd_sizes_allocate_nothing(store: CheckpointStore, num_bytes: int) -> None:
    forge(store, lambda manifest: manifest["shards"][0].update(bytes=num_bytes))
    resumes_from_1(store)


def test_linked_shards_are_not_followed(store: CheckpointStore, tmp_path: Path) -> None:
    shard = store.folder(2) / "shard-00000-of-00001.h5"
    shard.rename(tmp_path / "outside.h5")
    shard.symlink_to(tmp_path / "outside.h5")
    resumes_from_1(store)


def test_verify_says_the_same(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert verify_checkpoint(store, 1).problems == ()
    shard = store.folder(2) / "shard-00000-of-00001.h5"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    monkeypatch.setattr("hpctrain.checkpoint.verify.hdf5_problems", None)
    assert "does not match" in verify_checkpoint(store, 2).problems[0]


def test_verify_compares_the_names_in_hdf5(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A manifest forged to call a tensor by another name has right checksums; plain HDF5 readers would differ."""
    monkeypatch.undo()
    forge(store, lambda manifest: manifest["shards"][0]["tensors"][0].update(name="model/other"))
    assert "has an index that differs from the manifest" in verify_checkpoint(store, 2).problems[0]
    sum_up(store)
    assert "model/other" in verify_checkpoint(store, 2).problems[0]


OUT = h5py.ExternalLink("pipe", "/x")
SHARD = "shard-00000-of-00001.h5"


def replaced(shard: Path, item: Any) -> None:
    """Puts something in the place of a shard's dataset ``model/layer0/weight``."""
    with h5py.File(shard, "r+") as file:
        file.move("model/layer0/weight", "before")
        if isinstance(item, h5py.VirtualLayout):
            file.create_virtual_dataset("model/layer0/weight", item)
        elif isinstance(item, str):
            options: Any = {"external": [(item, 0, 36)]} if item == "pipe" else {item: True}
            file.create_dataset("model/layer0/weight", (9, 1), np.float32, **options)
        else:
            file["model/layer0/weight"] = item


def endless_layout() -> h5py.VirtualLayout:
    """For whose shape libhdf5 opens the source."""
    endless = slice(0, h5py.h5s.UNLIMITED)
    layout = h5py.VirtualLayout((9, 1), np.float32, maxshape=(None, 1))
    layout[endless, :] = h5py.VirtualSource("pipe", "x", (9, 1), maxshape=(None, 1))[endless, :]
    return layout


@pytest.mark.slow
@pytest.mark.timeout(60, method="thread")
@pytest.mark.parametrize(
    ("item", "problem"),
    [
        (OUT, "has no separate dataset model/layer0/weight"),
        (h5py.SoftLink("/model/layer1/weight"), "has no separate dataset model/layer0/weight"),
        (endless_layout(), "does not hold the bytes of model/layer0/weight itself"),
        ("pipe", "does not hold the bytes of model/layer0/weight itself"),
        ("chunks", "does not hold the bytes of model/layer0/weight itself"),
        (np.zeros((9, 2), np.float32), "with another shape or type than the manifest"),
        (np.zeros((9, 1), np.float32), "elsewhere than the manifest says"),
    ],
    ids=["external link", "soft link", "virtual", "external storage", "chunks", "shape", "offset"],
)
def test_verify_follows_nothing(
    store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, item: Any, problem: str
) -> None:
    """A shard with right checksums may lead to a pipe, where libhdf5 would wait for ever."""
    monkeypatch.undo()
    for folder in (tmp_path, store.folder(2)):
        os.mkfifo(folder / "pipe")
    monkeypatch.chdir(tmp_path)
    replaced(store.folder(2) / SHARD, item)
    sum_up(store)
    assert len(verify_checkpoint(store, 2).problems) == 1 and problem in verify_checkpoint(store, 2).problems[0]


def test_verify_outlives_what_libhdf5_does_with_odd_files(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes that were summed up after they were changed hang or crash libhdf5 now and then."""
    monkeypatch.undo()
    original = (store.folder(2) / SHARD).read_bytes()
    (store.folder(2) / SHARD).write_bytes(original[:9] + bytes(40) + original[49:])
    sum_up(store)
    assert "HDF5 cannot read it" in verify_checkpoint(store, 2).problems[0]
    (store.folder(2) / SHARD).write_bytes(original)
    sum_up(store)
    assert verify_checkpoint(store, 2).problems == ()
    crashed = subprocess.CompletedProcess[bytes]([], -signal.SIGSEGV, b"", b"")
    assert how_it_ended(crashed) == "HDF5 crashes on it (SIGSEGV)"
    monkeypatch.setattr("hpctrain.checkpoint.verify.LOOK_S", 0)
    monkeypatch.setattr("hpctrain.checkpoint.verify.DATASET_S", 0)
    assert "HDF5 did not finish reading it within 0 s" in verify_checkpoint(store, 2).problems[0]


def sum_up(store: CheckpointStore) -> None:
    """Gives the shard of step 2 right checksums, and an index again if libhdf5 has cut it off."""
    path = store.folder(2) / SHARD
    content = path.read_bytes()
    end = content.rfind(b'{"sha256": ')
    hdf5 = content[:end] if unframed(content[end:], end) else content

    def change(manifest: Any) -> None:
        shard = manifest["shards"][0]
        lengths = [math.prod(piece["count"]) * ITEM_TYPES[piece["dtype"]].itemsize for piece in shard["tensors"]]
        extents = sorted((piece["offset"], length) for piece, length in zip(shard["tensors"], lengths, strict=True))
        between = b"".join(hdf5[begin:end] for begin, end in gaps(extents, len(hdf5)))
        shard |= {"hdf5_bytes": len(hdf5), "crc32": f"{zlib.crc32(between):08x}"}
        for _ in range(3):  # the index holds its own length
            shard["bytes"] = len(hdf5) + len(framed(json.dumps(shard).encode(), 0))
        path.write_bytes(hdf5 + framed(json.dumps(shard).encode(), len(hdf5)))
        assert path.stat().st_size == shard["bytes"]

    forge(store, change)


def forge(store: CheckpointStore, change: Any) -> None:
    """Changes the manifest of step 2 and gives it a right checksum."""
    forge_manifest(store.folder(2), change)
