"""Is a checkpoint what was once written? One process reads all of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import h5py

from hpctrain.checkpoint.format import ITEM_TYPES, DamagedCheckpoint, Shard, UnreadableCheckpoint
from hpctrain.checkpoint.patience import patiently
from hpctrain.checkpoint.shard import read_shard
from hpctrain.checkpoint.store import CheckpointStore
from hpctrain.errors import UserError


@dataclass(frozen=True)
class Verdict:
    """What was found."""

    step: int
    path: Path
    num_bytes: int
    problems: tuple[str, ...]
    """None if it is sound."""
    readable: bool = True
    """Whether it could be read; where it could not, nobody knows whether it is sound."""


def verify(store: CheckpointStore, step: int) -> Verdict:
    """Checks manifest, sizes and checksums; then, on shards that are sound, that HDF5 sees what the manifest says."""
    folder, num_bytes = store.folder(step), 0
    problems: list[str] = []
    try:
        manifest = patiently(lambda: store.manifest(step))
        num_bytes = manifest.num_bytes
        for shard in manifest.shards:
            problems += shard_problems(folder, shard)
    except DamagedCheckpoint as error:
        problems.append(error.what)
    except (UnreadableCheckpoint, UserError) as error:
        return Verdict(step, folder, num_bytes, (*problems, error.what), readable=False)
    return Verdict(step, folder, num_bytes, tuple(problems))


def shard_problems(folder: Path, shard: Shard) -> list[str]:
    """What is damaged in a shard. Raises UnreadableCheckpoint, UserError."""
    try:
        patiently(lambda: read_shard(folder, shard))
    except DamagedCheckpoint as error:
        return [error.what]
    return hdf5_problems(folder / shard.file, shard)


def hdf5_problems(path: Path, shard: Shard) -> list[str]:
    """Differences between a shard's datasets and its entry of the manifest. The file's checksum must be right."""
    problems = []
    with h5py.File(path, "r", locking=False) as file:
        for stored in shard.pieces:
            piece = stored.piece
            dataset = file.get(piece.tensor.name)
            if not isinstance(dataset, h5py.Dataset):
                problems.append(f"{path} has no dataset {piece.tensor.name}")
            elif dataset.shape != piece.shape or dataset.dtype != ITEM_TYPES[piece.tensor.dtype]:
                problems.append(f"{path}: {piece.tensor.name} has another shape or type than in the manifest")
            elif piece.num_bytes and dataset.id.get_offset() != stored.offset:
                problems.append(f"{path}: {piece.tensor.name} lies elsewhere than the manifest says")
    return problems
