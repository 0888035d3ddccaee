"""Manifests: nothing unexpected is accepted, even with a checksum that is right."""

from __future__ import annotations

import copy
import hashlib
import json
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.checkpoint.format import manifest as module
from hpctrain.checkpoint.format import shard_index
from hpctrain.checkpoint.format.boxes import Box
from hpctrain.checkpoint.format.layout import (
    DamagedCheckpoint,
    Manifest,
    Shard,
    StoredPiece,
    TensorPiece,
    TensorSpec,
)
from hpctrain.errors import UserError

WEIGHT = TensorSpec("model/weight", (4, 200, 2), "float32")
STATE = TensorSpec("rng/state", (3,), "uint8", rank=1)
COUNT = TensorSpec("count", (), "int64")
BLOCK = 1024


def stored(tensor: TensorSpec, begin: tuple[int, ...], count: tuple[int, ...], offset: int) -> StoredPiece:
    piece = TensorPiece(tensor, Box(begin, count))
    return StoredPiece(piece, offset, BLOCK, tuple(range(offset, offset - (-piece.num_bytes // BLOCK))))


GOOD = Manifest(
    step=7,
    ranks=2,
    shards=(
        Shard(
            "shard-00000-of-00002.h5",
            9900,
            6000,
            1,
            (stored(WEIGHT, (0, 0, 0), (3, 200, 1), 800), stored(WEIGHT, (3, 0, 0), (1, 200, 2), 3200)),
        ),
        Shard(
            "shard-00001-of-00002.h5",
            9900,
            6000,
            2,
            (stored(WEIGHT, (0, 0, 1), (3, 200, 1), 800), stored(STATE, (0,), (3,), 3264), stored(COUNT, (), (), 4000)),
        ),
    ),
    meta={"note": "ü", "nested": [1, 2.5, None]},
)


def encode(manifest: Manifest) -> bytes:
    """The bytes of a manifest."""
    texts = [
        shard_index.shard_text(
            shard.file,
            shard.hdf5_bytes,
            shard.crc32,
            BLOCK,
            [shard_index.piece_text(stored.piece, stored.offset) for stored in shard.pieces],
            ["".join(f"{crc:08x}" for crc in stored.crc32) for stored in shard.pieces],
        )
        for shard in manifest.shards
    ]
    return module.encode(manifest.step, manifest.ranks, manifest.meta, texts)


def forge(document: Any) -> bytes:
    """A manifest with a right checksum around any document."""
    body = json.dumps(document).encode()
    return b'{"sha256": "%s", "manifest": %s}\n' % (hashlib.sha256(body).hexdigest().encode(), body)


def document() -> Any:
    return json.loads(encode(GOOD))["manifest"]


def expected() -> Manifest:
    """The manifest, with the sizes of files that end in these indexes."""
    sizes = [entry["bytes"] for entry in document()["shards"]]
    shards = tuple(replace(shard, num_bytes=size) for shard, size in zip(GOOD.shards, sizes, strict=True))
    return replace(GOOD, shards=shards)


def test_what_is_encoded_is_parsed_back():
    assert module.parse(encode(GOOD), "here") == expected()


def test_a_manifest_without_shards_is_not_one_of_an_empty_state():
    with pytest.raises(DamagedCheckpoint, match="it lists no shard"):
        module.parse(forge(document() | {"shards": []}), "here")


def test_an_index_knows_the_size_of_the_file_that_ends_in_it():
    for shard, entry in zip(GOOD.shards, document()["shards"], strict=True):
        text = re.search(rb'\{"file":"%s".*?\]\}' % shard.file.encode(), encode(GOOD), re.DOTALL)
        assert text and json.loads(text[0]) == entry
        assert entry["bytes"] == shard.hdf5_bytes + len(shard_index.framed(text[0], shard.hdf5_bytes))


def test_the_file_is_plain_json():
    assert set(json.loads(encode(GOOD))) == {"sha256", "manifest"}


@given(st.data())
def test_any_changed_byte_is_found(data):
    good = encode(GOOD)
    at = data.draw(st.integers(0, len(good) - 1))
    bad = bytearray(good)
    bad[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(DamagedCheckpoint):
        module.parse(bytes(bad), "here")


@given(st.integers(0, len(encode(GOOD)) - 1))
def test_any_truncation_is_found(length):
    with pytest.raises(DamagedCheckpoint):
        module.parse(encode(GOOD)[:length], "here")


def piece(shard: int = 0, index: int = 0) -> tuple[Any, ...]:
    return ("shards", shard, "tensors", index)


CRAFTED = [
    (("shards", 0, "file"), "/etc/passwd"),
    (("shards", 0, "file"), "../../shard-00000-of-00002.h5"),
    (("shards", 0, "file"), "shard-00001-of-00002.h5"),
    (("shards", 0, "bytes"), 10**30),
    (("shards", 0, "bytes"), -1),
    (("shards", 0, "bytes"), 900.0),
    (("shards", 0, "bytes"), True),
    (("shards", 0, "hdf5_bytes"), 3300),
    (("shards", 0, "hdf5_bytes"), 10**9),
    (("shards", 0, "block_bytes"), 0),
    (("shards", 0, "block_bytes"), 1000),
    (("shards", 0, "block_bytes"), 2048),
    (("shards", 0, "block_bytes"), 2**40),
    (("shards", 0, "crc32"), "0x000001"),
    ((*piece(), "name"), "../weight"),
    ((*piece(), "name"), "/weight"),
    ((*piece(), "name"), "a//b"),
    ((*piece(), "name"), "a\nb"),
    ((*piece(), "name"), "a" * 2000),
    ((*piece(), "dtype"), "object"),
    ((*piece(), "shape"), [2**62, 2**62]),
    ((*piece(), "shape"), [1] * 40),
    ((*piece(), "shape"), [-4, 200, 2]),
    ((*piece(), "shape"), "4"),
    ((*piece(), "begin"), [0, 0]),
    ((*piece(), "begin"), [0, 0, -1]),
    ((*piece(), "begin"), [0, 0, 1]),
    ((*piece(), "begin"), [2, 0, 0]),
    ((*piece(), "begin"), None),
    ((*piece(), "count"), [3, 200, 3]),
    ((*piece(), "count"), [2, 200, 1]),
    ((*piece(), "count"), [3, 200, 1.0]),
    ((*piece(), "count"), [2**60, 2**60, 1]),
    ((*piece(), "crc32"), "00000000" * 2),
    ((*piece(), "crc32"), "0000000g" * 3),
    ((*piece(), "offset"), 5999),
    ((*piece(), "offset"), -8),
    ((*piece(1, 1), "offset"), 3196),
    ((*piece(1, 1), "rank"), 2),
    ((*piece(1, 1), "rank"), -1),
    ((*piece(1, 2), "begin"), [0]),
    (("step",), 10**20),
    (("ranks",), 0),
    (("version",), 0),
    (("format",), "zip"),
    (("shards",), {}),
    (("meta",), []),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value"), CRAFTED)
def test_crafted_values_are_refused(path, value):
    crafted = document()
    at = crafted
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    with pytest.raises(DamagedCheckpoint):
        module.parse(forge(crafted), "here")


@pytest.mark.parametrize("key", ["format", "version", "step", "ranks", "meta", "shards"])
def test_every_key_is_needed(key):
    crafted = document()
    del crafted[key]
    with pytest.raises(DamagedCheckpoint, match=key):
        module.parse(forge(crafted), "here")


def test_missing_shard_and_repeated_tensor():
    crafted = document()
    del crafted["shards"][1]
    with pytest.raises(DamagedCheckpoint):
        module.parse(forge(crafted), "here")
    crafted = document()
    crafted["shards"][1]["tensors"].append(copy.deepcopy(crafted["shards"][1]["tensors"][1]))
    with pytest.raises(DamagedCheckpoint):
        module.parse(forge(crafted), "here")


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"a": 1, "a": 2}', b"NaN", b"\xff", b"1" * 5000])
def test_json_that_is_none_or_dangerous(body):
    framed = b'{"sha256": "%s", "manifest": %s}\n' % (hashlib.sha256(body).hexdigest().encode(), body)
    with pytest.raises(DamagedCheckpoint):
        module.parse(framed, "here")


@pytest.mark.parametrize("version", [1, 3, 99])
def test_another_version_than_is_written_is_the_users_to_solve(version):
    crafted = document()
    assert crafted["version"] == 2
    crafted["version"] = version
    with pytest.raises(UserError, match=f"version {version}"):
        module.parse(forge(crafted), "here")


def test_another_steps_manifest(tmp_path):
    (tmp_path / "manifest.json").write_bytes(encode(GOOD))
    assert module.read(tmp_path, 7) == expected()
    with pytest.raises(DamagedCheckpoint, match="another checkpoint"):
        module.read(tmp_path, 8)


def test_a_link_or_a_pipe_is_no_manifest(tmp_path):
    import os

    (tmp_path / "real.json").write_bytes(encode(GOOD))
    (tmp_path / "manifest.json").symlink_to("real.json")
    with pytest.raises(DamagedCheckpoint):
        module.read(tmp_path, 7)
    (tmp_path / "manifest.json").unlink()
    os.mkfifo(tmp_path / "manifest.json")
    with pytest.raises(DamagedCheckpoint):
        module.read(tmp_path, 7)


@pytest.mark.parametrize("meta", [{"a": float("nan")}, {"a": object()}, {"a": {1, 2}}])
def test_meta_must_be_json(meta):
    with pytest.raises(UserError, match="meta"):
        encode(Manifest(1, 1, (), meta))
