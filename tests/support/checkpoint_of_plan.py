"""Checkpoints of several shards, written by one process as a plan's ranks would, and functions that forge them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from hpctrain.checkpoint.checkpoint_folder import CheckpointFolder
from hpctrain.checkpoint.format.boxes import Box
from hpctrain.checkpoint.format.layout import MANIFEST_FILE, TensorPiece, TensorSpec, named_apart, shard_file
from hpctrain.checkpoint.format.shard import ShardImage, skeleton
from hpctrain.checkpoint.format.shard_index import framed, read_text

Part = tuple[TensorPiece, NDArray[Any]]
"""A rank's part of a tensor: its place, and its values."""


def parts_of(
    name: str, values: NDArray[Any], axis: int, count: int, dtype: str = "", rank: int | None = None
) -> list[Part]:
    """Split a tensor into ``count`` parts of about equal size along an axis; a scalar is a single part."""
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
    """Write a checkpoint with one shard for each of these lists, and return its folder.

    ``ranks`` is the number of ranks with state of their own.
    """
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
    """Change the manifest of a checkpoint and give it a valid checksum; leave the file alone if nothing changed."""
    path = folder / MANIFEST_FILE
    before, manifest = (json.loads(path.read_bytes())["manifest"] for _ in range(2))
    change(manifest)
    if manifest == before:
        return
    body = json.dumps(manifest).encode()
    path.write_bytes(b'{"sha256": "%s", "manifest": %s}\n' % (hashlib.sha256(body).hexdigest().encode(), body))


def forge_index(path: Path, change: Callable[[Any], None]) -> None:
    """Change the index of a shard and give it a valid checksum; leave the file alone if nothing changed.

    The file keeps its size if the new index fits.
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
