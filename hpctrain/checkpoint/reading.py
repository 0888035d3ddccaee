"""Reading a checkpoint by one process or by many: verify first, agree, then share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.checkpoint.format import manifest as manifest_file
from hpctrain.checkpoint.format.layout import ITEM_TYPES, DamagedCheckpoint, Manifest, Shard, step_folder
from hpctrain.checkpoint.format.shard import read_shard, view_of
from hpctrain.comm.group import Group

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
    """By name; bfloat16 as uint16. Where the number of ranks differs from the saved one: without random states of
    ranks, and with the mean of what other floating-point state the ranks had of their own."""
    dtypes: dict[str, str]
    """Logical types by name."""
    rejected: tuple[Rejected, ...] = ()
    """Newer checkpoints that were found damaged, newest first."""


def load_newest(path: Path, steps: Sequence[int], group: Group) -> Loaded:
    """The first sound checkpoint among these steps. Collective.

    Each rank reads and verifies every group.size-th shard; a checkpoint is sound when all ranks found their shards so.

    Raises:
        DamagedCheckpoint: none is sound.
    """
    rejected: list[Rejected] = []
    for step in steps:
        folder = path / step_folder(step)
        manifest, images, problem = read_part(folder, step, group)
        problems = [found for found in group.allgather(problem, f"verify {folder.name}") if found]
        if not problems:
            assert manifest is not None, "a checkpoint without a manifest has a problem"
            arrays = share(manifest, images, group)
            dtypes = {spec.name: spec.dtype for spec in manifest.tensors().values()}
            return Loaded(step, folder, manifest.ranks, manifest.meta, arrays, dtypes, tuple(rejected))
        del images
        rejected.append(Rejected(step, problems[0]))
    reasons = "; ".join(found.reason for found in rejected)
    fix = "restore the folder from a backup, or begin again with --fresh"
    raise DamagedCheckpoint(f"{path} has no sound checkpoint: {reasons}", fix)


Images = dict[int, NDArray[np.uint8]]
"""Shards in memory, by index."""


def read_part(folder: Path, step: int, group: Group) -> tuple[Manifest | None, Images, str | None]:
    """The manifest, this rank's part of the shards by index, and what is wrong with them."""
    try:
        manifest = manifest_file.read(folder, step)
        mine = range(group.rank, len(manifest.shards), group.size)
        return manifest, {index: read_shard(folder, manifest.shards[index]) for index in mine}, None
    except (DamagedCheckpoint, MemoryError) as error:
        return None, {}, getattr(error, "what", None) or "it does not fit into memory"


def share(manifest: Manifest, images: Images, group: Group) -> dict[str, NDArray[Any]]:
    """Arrays by name for this rank, from the shards that the ranks hold between them. Collective."""
    arrays: dict[str, NDArray[Any]] = {}
    of_ranks: dict[str, dict[int, NDArray[Any]]] = {}
    for index, shard in enumerate(manifest.shards):
        image = images[index] if index in images else np.empty(shard.num_bytes, dtype=np.uint8)
        group.broadcast_array(image, f"send {shard.file}", root=index % group.size)
        take(shard, image, arrays, of_ranks, group.rank if manifest.ranks == group.size else None)
    for name, values in of_ranks.items():
        if not name.startswith(RANDOM):
            arrays[name] = merged([values[rank] for rank in sorted(values)], group.rank)
    return arrays


def take(
    shard: Shard,
    image: NDArray[np.uint8],
    arrays: dict[str, NDArray[Any]],
    of_ranks: dict[str, dict[int, NDArray[Any]]],
    rank: int | None,
) -> None:
    """Adds replicated values and this rank's to ``arrays``, or where ``rank`` is None every rank's to ``of_ranks``."""
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
    """One value from those of another number of ranks: the mean of statistics, else one rank's in turn."""
    first = values[0]
    if first.dtype.kind == "f" and all(value.shape == first.shape for value in values):
        return np.mean(values, axis=0, dtype=np.float64).astype(first.dtype)
    return values[rank % len(values)]
