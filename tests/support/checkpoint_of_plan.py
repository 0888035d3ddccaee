"""Checkpoints of several shards, written by one process as the ranks of a plan write them; and what is done to them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from hpctrain.checkpoint.folder import CheckpointFolder
from hpctrain.checkpoint.format.boxes import Box
from hpctrain.checkpoint.format.layout import MANIFEST_FILE, TensorPiece, TensorSpec, named_apart, shard_file
from hpctrain.checkpoint.format.shard import ShardImage, skeleton
from hpctrain.checkpoint.format.shard_index import framed, read_text

Part = tuple[TensorPiece, NDArray[Any]]
"""What a rank writes of a tensor: where it lies, and its values."""


def parts_of(
    name: str, values: NDArray[Any], axis: int, count: int, dtype: str = "", rank: int | None = None
) -> list[Part]:
    """A tensor in so many parts of about the same size along an axis; one part of a scalar."""
    tensor = TensorSpec(name, values.shape, dtype or values.dtype.name, rank)
    if not values.shape:
        return [(TensorPiece(tensor, Box((), ())), values)]
    found = []
    for index in range(count):
        begin, end = values.shape[axis] * index // count, values.shape[axis] * (index + 1) // count
        place = tuple(begin if each == axis else 0 for each in range(values.ndim))
        shape = tuple(end - begin if each == axis else length for each, length in enumerate(values.shape))
        box = Box(place, shape)
        found.append((TensorPiece(tensor, box), values[box.index]))
    return found


def write_shards(folder: CheckpointFolder, step: int, shards: Sequence[Sequence[Part]], ranks: int = 1) -> Path:
    """A checkpoint in which each of these lists is a shard; ``ranks`` have state of their own."""
    partial = folder.partial(step, "plan")
    folder.prepare_folder(partial)
    for index, parts in enumerate(shards):
        image = ShardImage(skeleton(named_apart([piece for piece, _ in parts])))
        for view, (_, values) in zip(image.views, parts, strict=True):
            view[...] = values
        image.write(partial / shard_file(index, len(shards)))
    folder.commit(partial, step, len(shards), {"step": step}, looks_through=True, owners=ranks)
    return folder.folder(step)


def forge_manifest(folder: Path, change: Callable[[Any], None]) -> None:
    """Changes the manifest of a checkpoint and gives it a right checksum; leaves it if nothing is another."""
    path = folder / MANIFEST_FILE
    before, manifest = (json.loads(path.read_bytes())["manifest"] for _ in range(2))
    change(manifest)
    if manifest == before:
        return
    body = json.dumps(manifest).encode()
    path.write_bytes(b'{"sha256": "%s", "manifest": %s}\n' % (hashlib.sha256(body).hexdigest().encode(), body))


def forge_index(path: Path, change: Callable[[Any], None]) -> None:
    """Changes the index of a shard and gives it a right checksum; leaves it if nothing is another.

    The file keeps its size if that can be.
    """
    with open(path, "rb") as file:
        text = read_text(file.fileno(), path)
    size, data = path.stat().st_size, path.read_bytes()
    index = json.loads(text)
    hdf5_bytes = index["hdf5_bytes"]
    change(index)
    if index == json.loads(text):
        return
    plain = json.dumps(index, separators=(",", ":")).encode()
    room = size - hdf5_bytes - len(framed(plain, hdf5_bytes))
    path.write_bytes(data[:hdf5_bytes] + framed(plain + b" " * max(0, room), hdf5_bytes))
