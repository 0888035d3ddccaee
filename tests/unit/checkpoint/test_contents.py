"""Any part of a tensor is read from any cut of it, and nothing else is read, held or trusted."""

from __future__ import annotations

import math
import os
import tracemalloc
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.checkpoint import safetensors
from hpctrain.checkpoint.checkpoint_folder import CheckpointFolder
from hpctrain.checkpoint.format import shard as shard_module
from hpctrain.checkpoint.format import shard_index, shard_reading
from hpctrain.checkpoint.format.boxes import Box, everything
from hpctrain.checkpoint.format.layout import (
    ITEM_TYPES,
    DamagedCheckpoint,
    Manifest,
    TensorPiece,
    TensorSpec,
    shard_file,
)
from hpctrain.checkpoint.format.shard import ShardImage, skeleton
from hpctrain.checkpoint.reading import LoadedArrays
from hpctrain.checkpoint.store import CheckpointStore
from hpctrain.checkpoint.verify import verify_checkpoint
from tests.support.tilings import boxes_within, shapes, tilings

BLOCK = 1024
MIB = 1 << 20


def values_of(tensor: TensorSpec) -> np.ndarray:
    count = math.prod(tensor.shape)
    return (np.random.default_rng(count).random(count) * 100).astype(ITEM_TYPES[tensor.dtype]).reshape(tensor.shape)


def save(folder: Path, tensor: TensorSpec, boxes: Sequence[Box], shards: int) -> Manifest:
    """A checkpoint of step 0 of one tensor, whose parts are dealt out to shards."""
    checkpoints = CheckpointFolder(folder)
    checkpoints.prepare_folder(partial := checkpoints.partial(0, "test"))
    for rank in range(shards):
        own = [TensorPiece(tensor, box) for box in boxes[rank::shards]][:1]  # a file holds one dataset of a name
        image = ShardImage(skeleton(own))
        for view, piece in zip(image.views, own, strict=True):
            view[...] = values_of(tensor)[piece.box.index]
        image.write(partial / shard_file(rank, shards))
    checkpoints.commit(partial, 0, shards, {}, looks_through=True)
    return checkpoints.manifest(0)


@settings(deadline=None, max_examples=40)
@given(st.data(), shapes, st.sampled_from(["uint8", "bfloat16", "float32", "complex128", "bool"]))
def test_any_part_is_read_from_any_cut(tmp_path_factory, data, shape, dtype):
    folder = tmp_path_factory.mktemp("cut")
    tensor, boxes = TensorSpec("model/w", shape, dtype), data.draw(tilings(shape))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_module, "SUMMED_BYTES", BLOCK)
        manifest = save(folder, tensor, boxes, len(boxes))
    with closing(LoadedArrays(CheckpointFolder(folder).folder(0), manifest, 0, {})) as contents:
        whole = values_of(tensor)
        np.testing.assert_array_equal(contents["model/w"], whole)
        assert contents["model/w"].dtype == whole.dtype and contents.shape_of("model/w") == shape
        for box in (data.draw(boxes_within(shape)) for _ in range(5)):
            found = contents.part("model/w", box.begin, box.shape)
            assert found.shape == box.shape
            np.testing.assert_array_equal(found, whole[box.index])


@pytest.fixture
def matrix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Manifest, TensorSpec]:
    """300 x 70 x 5 float32 in blocks of 1 KiB, which begin anywhere in a row; cut along the second axis."""
    monkeypatch.setattr(shard_module, "SUMMED_BYTES", BLOCK)
    tensor = TensorSpec("model/w", (300, 70, 5), "float32")
    manifest = save(tmp_path, tensor, [Box((0, 0, 0), (300, 30, 5)), Box((0, 30, 0), (300, 40, 5))], 2)
    return CheckpointFolder(tmp_path).folder(0), manifest, tensor


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_parts_of_many_blocks(tmp_path_factory, data):
    tensor = TensorSpec("model/w", (60, 70, 5), data.draw(st.sampled_from(["float32", "complex128", "uint8"])))
    boxes = data.draw(tilings(tensor.shape))
    folder = tmp_path_factory.mktemp("blocks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_module, "SUMMED_BYTES", BLOCK)
        manifest = save(folder, tensor, boxes, len(boxes))
    with closing(LoadedArrays(CheckpointFolder(folder).folder(0), manifest, 0, {})) as contents:
        box = data.draw(boxes_within(tensor.shape))
        found = contents.part("model/w", box.begin, box.shape)
        np.testing.assert_array_equal(found, values_of(tensor)[box.index])


@settings(deadline=None, max_examples=40)
@given(st.data(), shapes, st.sampled_from(["uint8", "bfloat16", "float32", "bool"]), st.sampled_from([1, 16, 4096]))
def test_any_part_of_a_safetensors_file_is_read(tmp_path_factory, data, shape, dtype, least):
    """It has no checksums: what lies in a row is read alone from some length on, and else with what is between."""
    path, tensor = tmp_path_factory.mktemp("file") / "a.safetensors", TensorSpec("w", shape, dtype)
    path.write_bytes(b"".join(safetensors.encode({"w": values_of(tensor)}, {"w": dtype}, {})))
    box = data.draw(boxes_within(shape))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_reading, "LEAST_RUN_BYTES", least)
        arrays, _ = safetensors.read(path)
        np.testing.assert_array_equal(arrays.part("w", box.begin, box.shape), values_of(tensor)[box.index])


def test_a_part_outside_is_refused(matrix):
    folder, manifest, _ = matrix
    with closing(LoadedArrays(folder, manifest, 0, {})) as contents:
        for begin, shape in [((0, 0, 0), (301, 1, 1)), ((0, 69, 0), (1, 2, 1)), ((-1, 0, 0), (1, 1, 1)), ((0,), (1,))]:
            with pytest.raises(ValueError, match="is not within it"):
                contents.part("model/w", begin, shape)
        assert "model/w" in contents and "model" not in contents and list(contents) == ["model/w"]


def test_damage_is_found_in_what_is_read_and_only_there(matrix):
    folder, manifest, tensor = matrix
    (stored,) = manifest.shards[1].pieces
    path = folder / manifest.shards[1].file
    original = path.read_bytes()
    whole, rng = values_of(tensor), np.random.default_rng(0)
    with closing(LoadedArrays(folder, manifest, 0, {})) as contents:
        for at in rng.integers(0, stored.piece.num_bytes, 60).tolist():
            path.write_bytes(changed(original, stored.offset + at))
            row = at // (40 * 5 * 4)
            first, last = max(0, row - 2), min(300, row + 3)  # blocks of other rows are not read
            with pytest.raises(DamagedCheckpoint, match=r"shard-00001-of-00002\.h5 is damaged: .* model/w does not"):
                contents.part("model/w", (row, 30, 0), (1, 40, 5))
            for begin, end in ((0, first), (last, 300)):
                found = contents.part("model/w", (begin, 0, 0), (end - begin, 70, 5))
                np.testing.assert_array_equal(found, whole[begin:end])
            np.testing.assert_array_equal(contents.part("model/w", (0, 0, 0), (300, 30, 5)), whole[:, :30])


def changed(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def test_no_more_is_read_than_is_asked_for(matrix, monkeypatch):
    folder, manifest, _ = matrix
    read, real = [], os.preadv

    def preadv(descriptor, views, offset):
        read.append(len(views[0]))
        return real(descriptor, views, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    with closing(LoadedArrays(folder, manifest, 0, {})) as contents:
        for box in (Box((40, 0, 0), (50, 70, 5)), Box((0, 31, 0), (300, 39, 5)), Box((299, 69, 4), (1, 1, 1))):
            read.clear()
            contents.part("model/w", box.begin, box.shape)
            needed = sum(piece.box.overlap(box).size * 4 for shard in manifest.shards for piece in pieces_of(shard))
            most = needed + 4 * BLOCK + (needed // 39 if box.shape[1] == 39 else 0)  # a column between is read too
            assert sum(read) <= most, box
        read.clear()
        contents.part("model/w", (5, 5, 5), (0, 3, 0))
        assert not read


def pieces_of(shard: Any) -> list[TensorPiece]:
    return [stored.piece for stored in shard.pieces]


def test_a_reader_holds_what_it_returns_and_a_block(tmp_path):
    store = CheckpointStore(tmp_path)
    large = np.random.default_rng(0).random((40, 1024, 256), dtype=np.float32)  # 40 MiB
    store.save({"model/large": large, "model/small": np.ones(3)}, step=1)
    store.close()
    del large
    everything_else = {
        "verify": (lambda: verify_checkpoint(store, 1), 0),
        "a part": (lambda: part_of(store), 10 * MIB),
        "load_into": (lambda: store.load_into(lambda loaded: {"x": loaded.arrays["model/small"]}), 0),
        "load": (store.load, 40 * MIB),
    }
    for name, (read, held) in everything_else.items():
        tracemalloc.start()
        read()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < held + 5 * MIB, f"{name}: {peak / MIB:.1f} MiB"


def part_of(store: CheckpointStore) -> np.ndarray:
    with store.opened(1) as loaded:
        return loaded.arrays.part("model/large", (0, 0, 64), (40, 1024, 64))


def test_a_shard_tells_what_it_holds_without_the_manifest(matrix):
    folder, manifest, tensor = matrix
    for shard in manifest.shards:
        path = folder / shard.file
        with open(path, "rb") as file:
            assert shard_index.parse_text(shard_index.read_text(file.fileno(), path), "index") == shard
        with h5py.File(path) as hdf5:  # which does not mind what stands behind its end
            np.testing.assert_array_equal(hdf5["model/w"][...], values_of(tensor)[shard.pieces[0].piece.box.index])


def test_every_byte_of_an_index_counts(matrix):
    folder, manifest, _ = matrix
    shard, rng = manifest.shards[0], np.random.default_rng(0)
    path = folder / shard.file
    original = path.read_bytes()
    places = range(shard.hdf5_bytes, shard.num_bytes)
    wrong = [changed(original, at) for at in rng.choice(places, 150, replace=False)]
    wrong += [original[:at] for at in rng.choice(places, 30, replace=False)]
    wrong += [b"", original[:7], original + b"\0", original + original]
    for data in wrong:
        path.write_bytes(data)
        with open(path, "rb") as file, pytest.raises(DamagedCheckpoint, match="does not end in an index"):
            shard_index.read_text(file.fileno(), path)


def test_an_index_that_differs_from_the_manifest_is_told(tmp_path):
    store = CheckpointStore(tmp_path)
    for step, value in ((1, 1.0), (2, 2.0)):
        store.save({"model/w": np.full(9, value)}, step=step)
    store.close()
    first, second = (store.folder(step) / shard_file(0, 1) for step in (1, 2))
    size = store.manifest(1).shards[0].hdf5_bytes
    second.write_bytes(second.read_bytes()[:size] + first.read_bytes()[size:])
    assert any("has an index that differs" in problem for problem in verify_checkpoint(store, 2).problems)


def test_parts_of_scalars_and_of_nothing(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save({"count": np.int64(7), "none": np.zeros((0, 3))}, step=1)
    store.close()
    with store.opened(1) as loaded:
        assert loaded.arrays.part("count", (), ()) == 7 and everything(()).size == 1
        assert loaded.arrays.part("none", (0, 1), (0, 2)).shape == (0, 2)
