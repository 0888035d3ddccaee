"""Shards: what is written is what h5py, h5dump and we read."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.checkpoint.checkpoint_folder import index_of
from hpctrain.checkpoint.format import shard_reading
from hpctrain.checkpoint.format.boxes import Box
from hpctrain.checkpoint.format.layout import (
    ITEM_TYPES,
    DamagedCheckpoint,
    Shard,
    TensorPiece,
    TensorSpec,
    check_tensors,
    whole_tensor,
)
from hpctrain.checkpoint.format.shard import ShardImage, skeleton, view_of
from hpctrain.checkpoint.format.shard_index import parse_text
from hpctrain.checkpoint.format.shard_reading import check_shard, read_shard
from hpctrain.errors import UserError
from tests.support.mpi import PATIENCE_S


def fill(image: ShardImage, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    for view in image.views:
        view[...] = (rng.random(view.shape) * 2).astype(view.dtype)


def image_of(*tensors: TensorSpec) -> ShardImage:
    image = ShardImage(skeleton([whole_tensor(tensor) for tensor in tensors]))
    fill(image)
    return image


def write(image: ShardImage, path: Path) -> Shard:
    """Writes a shard, and what its index says of it."""
    image.write(path)
    text, num_bytes = index_of(path)
    shard = parse_text(text, "index")
    assert (shard.file, shard.num_bytes) == (path.name, num_bytes)
    return shard


ALL_TYPES = [TensorSpec(f"types/{dtype}", (3, 5), dtype) for dtype in ITEM_TYPES]
ODD_SHAPES = [
    TensorSpec(f"shapes/{index}", shape, "float64") for index, shape in enumerate([(), (0,), (0, 3), (1,) * 32, (7,)])
]


def test_h5py_reads_every_type_and_shape(tmp_path):
    image = image_of(*ALL_TYPES, *ODD_SHAPES)
    shard = write(image, tmp_path / "shard-00000-of-00001.h5")
    with h5py.File(tmp_path / shard.file) as file:
        views = {piece.tensor.name: view for piece, view in zip(image.pieces, image.views, strict=True)}
        for stored in shard.pieces:
            view = views[stored.piece.tensor.name]
            dataset = file[stored.piece.tensor.name]
            assert dataset.shape == stored.piece.shape
            assert dataset.chunks is None and dataset.is_virtual is False and dataset.external is None
            np.testing.assert_array_equal(dataset[()], view)
            assert not stored.piece.num_bytes or dataset.id.get_offset() == stored.offset
        assert file["types/bool"].dtype == np.bool_
        assert file["types/complex64"].dtype == np.complex64


def test_h5dump_reads_every_type(tmp_path):
    if not shutil.which("h5dump"):
        pytest.skip("this machine has no h5dump")
    image = image_of(*ALL_TYPES, *ODD_SHAPES)
    write(image, tmp_path / "shard.h5")
    for piece, view in zip(image.pieces, image.views, strict=True):
        command = ["h5dump", "-d", f"/{piece.tensor.name}", "-b", "FILE", "-o", "bytes", "shard.h5"]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=PATIENCE_S)
        assert (tmp_path / "bytes").read_bytes() == view.tobytes(), piece.tensor.name
    header = subprocess.run(
        ["h5dump", "-H", "shard.h5"], cwd=tmp_path, check=True, capture_output=True, timeout=PATIENCE_S
    )
    assert header.stdout.count(b"DATASET") == len(image.views) and b"ATTRIBUTE" not in header.stdout


@settings(max_examples=25)
@given(st.lists(st.tuples(st.sampled_from(sorted(ITEM_TYPES)), st.lists(st.integers(0, 9), max_size=4)), max_size=30))
def test_round_trip(tmp_path_factory, kinds):
    folder = tmp_path_factory.mktemp("shard")
    image = image_of(
        *(TensorSpec(f"g{index % 3}/t{index}", tuple(shape), dtype) for index, (dtype, shape) in enumerate(kinds))
    )
    shard = write(image, folder / "shard-00000-of-00001.h5")
    buffer = read_shard(folder, shard)
    views = {piece.tensor.name: view for piece, view in zip(image.pieces, image.views, strict=True)}
    assert len(shard.pieces) == len(views)
    for stored in shard.pieces:
        view = views[stored.piece.tensor.name]
        np.testing.assert_array_equal(view_of(buffer, stored.piece, stored.offset), view)


def test_the_same_state_gives_the_same_bytes(tmp_path):
    (tmp_path / "second").mkdir()
    write(image_of(*ALL_TYPES), tmp_path / "a.h5")
    second = int(time.time())  # HDF5 keeps times in seconds
    while int(time.time()) == second:
        time.sleep(0.01)
    write(image_of(*ALL_TYPES), tmp_path / "second" / "a.h5")
    assert (tmp_path / "a.h5").read_bytes() == (tmp_path / "second" / "a.h5").read_bytes()


@pytest.mark.parametrize("columns", [7, 5], ids=["whole rows", "some of the columns"])
def test_every_block_has_the_checksum_that_zlib_gives_it(tmp_path, columns):
    """Blocks begin where pieces do, so nearly all of them lie in two of the blocks that are written in one go."""
    wide = TensorSpec("wide", (90_000, 7), "float64")
    part = TensorPiece(wide, Box((5, 0), (80_001, columns)))
    pieces = [whole_tensor(TensorSpec("first", (3,), "int8")), part, *map(whole_tensor, ODD_SHAPES)]
    image = ShardImage(skeleton(pieces))
    for seed in (1, 2):
        fill(image, seed)
        shard = write(image, tmp_path / f"shard-{seed}.h5")
        data = (tmp_path / shard.file).read_bytes()
        for stored in shard.pieces:
            end = stored.offset + stored.piece.num_bytes
            blocks = range(stored.offset, end, stored.block_bytes)
            assert stored.crc32 == tuple(zlib.crc32(data[at : min(at + stored.block_bytes, end)]) for at in blocks)


def test_without_isal_sums_are_those_of_zlib():
    code = "import sys; sys.modules['isal'] = None; from hpctrain.checkpoint.format import durable_files; "
    subprocess.run(
        [sys.executable, "-c", code + "assert durable_files.crc32.__module__ == 'zlib'"], check=True, timeout=60
    )


def test_arrays_begin_at_cache_lines():
    assert all(offset % 64 == 0 for offset, _ in image_of(*ALL_TYPES, *ODD_SHAPES).extents)


def test_an_image_is_filled_and_written_again(tmp_path):
    image = image_of(*ALL_TYPES)
    first = write(image, tmp_path / "a.h5")
    fill(image, seed=1)
    second = write(image, tmp_path / "b.h5")
    assert first.pieces != second.pieces and first.crc32 == second.crc32
    np.testing.assert_array_equal(read_shard(tmp_path, second)[: second.hdf5_bytes], image.buffer)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex64"])
@pytest.mark.parametrize("spoil", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_found_and_what_is_large_is_not(dtype, spoil):
    image = image_of(TensorSpec("other", (3,), "float32"), TensorSpec("w", (40, 7), dtype))
    (other, values), names = image.views, ["w"]
    other[0] = np.nan
    largest = 0x7F7F if dtype == "bfloat16" else np.finfo(values.dtype).max  # their sum overflows
    values[...] = largest
    assert image.first_not_finite(names) is None
    values[39, 3] = (np.float32(spoil).view(np.uint32) >> 16) if dtype == "bfloat16" else spoil
    assert image.first_not_finite(names) == "w"
    assert image.first_not_finite(["other", "w"]) == "other"


class Late:
    """An executor whose thread is as late as it can be: it computes when somebody waits for the result."""

    def __init__(self, *ignored: object) -> None:
        """Needs no threads."""

    def submit(self, function: Callable[..., int], data: memoryview) -> SimpleNamespace:
        return SimpleNamespace(result=lambda: function(data))

    def shutdown(self) -> None:
        """Has nothing to end."""


def test_a_block_that_waits_for_its_checksum_is_not_overwritten(tmp_path, monkeypatch):
    """Small blocks, which are summed at once, lie between large ones, which take turns in memory."""
    image = image_of(*(TensorSpec(f"w{number}", (2 * 2**20 + 100,), "uint8") for number in range(4)))
    shard = write(image, tmp_path / "shard-00000-of-00001.h5")
    monkeypatch.setattr(shard_reading, "ThreadPoolExecutor", Late)
    check_shard(tmp_path, shard)


def test_damage_names_the_tensor_and_never_reaches_hdf5(tmp_path, monkeypatch):
    shard = write(image_of(*ALL_TYPES), tmp_path / "shard-00000-of-00001.h5")
    stored = next(stored for stored in shard.pieces if stored.piece.tensor.name == "types/int16")
    flip(tmp_path / shard.file, stored.offset + 3)
    monkeypatch.setattr(h5py, "File", None)
    for read in (read_shard, check_shard):
        with pytest.raises(DamagedCheckpoint, match="types/int16"):
            read(tmp_path, shard)


def test_a_link_a_pipe_and_a_folder_are_no_shards(tmp_path):
    shard = write(image_of(*ALL_TYPES), tmp_path / "shard-00000-of-00001.h5")
    path = tmp_path / shard.file
    path.rename(tmp_path / "elsewhere.h5")
    path.symlink_to("elsewhere.h5")
    with pytest.raises(DamagedCheckpoint, match="not a plain file"):
        read_shard(tmp_path, shard)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(DamagedCheckpoint, match="not a plain file"):
        read_shard(tmp_path, shard)
    path.unlink()
    path.mkdir()
    with pytest.raises(DamagedCheckpoint):
        read_shard(tmp_path, shard)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ([("a", "float32"), ("a/b", "float32")], "below a"),
        ([("a", "float32"), ("a", "float32")], "same name"),
        ([("../a", "float32")], "not a name"),
        ([("a/./b", "float32")], "not a name"),
        ([("", "float32")], "not a name"),
        ([("a", "object")], "object"),
    ],
)
def test_what_hdf5_cannot_hold_is_refused(tensors, words):
    with pytest.raises(UserError, match=words):
        check_tensors([TensorSpec(name, (1,), dtype) for name, dtype in tensors])


def test_a_limit_on_files_is_told():
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            skeleton([whole_tensor(TensorSpec("w", (1 << 19,), "float32"))])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def flip(path: Path, at: int, bits: int = 1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= bits
    path.write_bytes(data)


def test_reading_past_the_end_is_damage_not_a_hang(tmp_path):
    shard = write(image_of(*ALL_TYPES), tmp_path / "shard-00000-of-00001.h5")
    os.truncate(tmp_path / shard.file, shard.num_bytes - 1)
    with pytest.raises(DamagedCheckpoint, match="bytes in place of"):
        read_shard(tmp_path, shard)
