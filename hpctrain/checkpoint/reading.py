"""Reading a checkpoint by one process or by many: verify first, agree, then share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.checkpoint.format import manifest as manifest_file
from hpctrain.checkpoint.format.layout import ITEM_TYPES, MANIFEST_FILE, DamagedCheckpoint, Manifest, Shard
from hpctrain.checkpoint.format.shard import read_shard, view_of
from hpctrain.checkpoint.patience import read_among
from hpctrain.comm.group import Group
from hpctrain.run import step_folder
from hpctrain.train.stateful import STATE
from hpctrain.train.tree import STRUCTURE

RANDOM = "rng/"
"""Prefix of random states, which mean nothing to another number of ranks."""


@dataclass(frozen=True)
class Rejected:
    """A checkpoint that was not used."""

    step: int
    reason: str


@dataclass(frozen=True)
class Loaded:
    """A checkpoint's contents, verified."""

    step: int
    """Of the checkpoint."""
    path: Path
    """Its folder."""
    ranks: int
    """Ranks of the run that saved it."""
    meta: dict[str, Any]
    """What was saved as ``meta``."""
    arrays: dict[str, NDArray[Any]]
    """By name; bfloat16 as uint16. If the number of ranks differs from the saved one: without random states of
    ranks, and with the mean of what other floating-point state the ranks had of their own."""
    dtypes: dict[str, str]
    """Logical types by name."""
    rejected: tuple[Rejected, ...] = ()
    """Newer checkpoints that were found damaged, newest first."""
    of_ranks: Mapping[str, Mapping[int, NDArray[Any]]] = field(default_factory=dict)
    """If the number of ranks differs from the saved one: what each rank had of the task's own state, by name."""


def load_newest(path: Path, steps: Sequence[int], group: Group) -> Loaded:
    """The first sound checkpoint among these steps. Collective.

    Each rank reads and verifies every group.size-th shard; a checkpoint is sound when all ranks found their shards so.

    Raises:
        DamagedCheckpoint: none is sound.
        UnreadableCheckpoint: one cannot be read now, so that nobody knows whether it is sound.
    """
    rejected: list[Rejected] = []
    for step in steps:
        folder = path / step_folder.name_of(step)
        try:
            manifest = read_manifest(folder, step, group)
            images, holders = read_shards(folder, manifest.shards, group)
        except DamagedCheckpoint as error:
            rejected.append(Rejected(step, error.what))
            continue
        arrays, of_ranks = share(manifest, images, holders, group)
        dtypes = {spec.name: spec.dtype for spec in manifest.tensors().values()}
        return Loaded(step, folder, manifest.ranks, manifest.meta, arrays, dtypes, tuple(rejected), of_ranks)
    reasons = "; ".join(found.reason for found in rejected)
    fix = "restore the folder from a backup, or begin again with --fresh"
    raise DamagedCheckpoint(f"{path} has no sound checkpoint: {reasons}", fix)


Images = dict[int, NDArray[np.uint8]]
"""Shards in memory, by index."""
Arrays = dict[str, NDArray[Any]]
"""By name."""
OfRanks = dict[str, dict[int, NDArray[Any]]]
"""By name and rank."""


def read_manifest(folder: Path, step: int, group: Group) -> Manifest:
    """The manifest, which one rank reads for all. Collective. Raises as ``read_among`` does."""
    what = f"read the manifest of {folder.name}"
    held, (holder,) = read_among(group, 1, lambda _: manifest_file.read_with_bytes(folder, step), what)
    data, manifest = held.get(0, (b"", None))
    received = np.empty(group.broadcast(len(data), what, root=holder), dtype=np.uint8)
    received[:] = np.frombuffer(data, np.uint8) if manifest else 0
    group.broadcast_array(received, what, root=holder)
    return manifest or manifest_file.parse_of_step(received.tobytes(), folder / MANIFEST_FILE, step)


def read_shards(folder: Path, shards: Sequence[Shard], group: Group) -> tuple[Images, list[int]]:
    """This rank's part of the shards, and which rank holds each. Collective. Raises as ``read_among`` does."""
    return read_among(group, len(shards), lambda index: read_shard(folder, shards[index]), f"verify {folder.name}")


def share(manifest: Manifest, images: Images, holders: Sequence[int], group: Group) -> tuple[Arrays, OfRanks]:
    """Arrays by name for this rank, and what has a rule of its own, from the ranks' shards. Collective.

    Args:
        images: this rank's shards.
        holders: for each shard the rank that holds it.
    """
    arrays: Arrays = {}
    of_ranks: OfRanks = {}
    for index, shard in enumerate(manifest.shards):
        image = images[index] if index in images else np.empty(shard.num_bytes, dtype=np.uint8)
        group.broadcast_array(image, f"send {shard.file}", root=holders[index])
        take(shard, image, arrays, of_ranks, group.rank if manifest.ranks == group.size else None)
    for name, values in of_ranks.items():
        if not name.startswith((RANDOM, STATE)):
            fit = same(of_ranks.get(f"{name.rpartition('/')[0]}/{STRUCTURE}", {}))
            of_one = values[sorted(values)[group.rank % len(values)]]
            arrays[name] = merged([values[rank] for rank in sorted(values)], group.rank) if fit else of_one
    return arrays, {name: values for name, values in of_ranks.items() if name.startswith(STATE)}


def same(values: Mapping[int, NDArray[Any]]) -> bool:
    """Whether all ranks had the same; then what belongs together by it can be merged."""
    return len({value.tobytes() for value in values.values()}) < 2


def take(
    shard: Shard,
    image: NDArray[np.uint8],
    arrays: Arrays,
    of_ranks: OfRanks,
    rank: int | None,
) -> None:
    """Adds replicated values and this rank's to ``arrays``, or if ``rank`` is None every rank's to ``of_ranks``."""
    for stored in shard.pieces:
        piece, tensor = stored.piece, stored.piece.tensor
        view = view_of(image, piece, stored.offset)
        if tensor.rank is None and not piece.whole:
            if tensor.name not in arrays:
                arrays[tensor.name] = np.empty(tensor.shape, ITEM_TYPES[tensor.dtype])
            arrays[tensor.name][piece.first_row : piece.first_row + piece.rows] = view
        elif tensor.rank is None or tensor.rank == rank:
            arrays[tensor.name] = view
        elif rank is None:
            of_ranks.setdefault(tensor.name, {})[tensor.rank] = view.copy()


def merged(values: Sequence[NDArray[Any]], rank: int) -> NDArray[Any]:
    """One value from those of another number of ranks: the one they agree on, the mean of statistics, else one's."""
    first = values[0]
    if all(value.tobytes() == first.tobytes() for value in values[1:]):
        return first
    if first.dtype.kind == "f" and all((one.shape, one.dtype) == (first.shape, first.dtype) for one in values):
        with np.errstate(all="ignore"):  # what was not finite stays so
            return np.mean(values, axis=0, dtype=np.float64).astype(first.dtype)
    return values[rank % len(values)]
