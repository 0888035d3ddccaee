"""Verifies a checkpoint in one process, which reads all of it block by block.

Checksums show that the bytes are those written, not that they are valid: a file made by another program, or by an
attacker, can hang or crash libhdf5. Therefore libhdf5 reads it in a separate process, with a timeout.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import h5py

from hpctrain.checkpoint.format import layout
from hpctrain.checkpoint.format import manifest as manifest_file
from hpctrain.checkpoint.format.shard_reading import check_shard
from hpctrain.checkpoint.frozen import FROZEN, FrozenRecord, FrozenSource
from hpctrain.checkpoint.read_retry import patiently
from hpctrain.checkpoint.reading import open_source
from hpctrain.checkpoint.store import CheckpointStore
from hpctrain.data.formats.hdf5_files import own_dataset
from hpctrain.errors import UserError
from hpctrain.system import foreign_text, python

LOOK_S = 30.0
"""Timeout in seconds for libhdf5 to examine a checkpoint, plus DATASET_S for each dataset."""
DATASET_S = 0.01


@dataclass(frozen=True)
class VerifyResult:
    """The result of ``verify_checkpoint``."""

    step: int
    path: str
    num_bytes: int
    problems: tuple[str, ...]
    """Empty if the checkpoint is sound."""
    readable: bool = True
    """Whether it could be read; if not, it is unknown whether it is sound."""


def verify_checkpoint(store: CheckpointStore, step: int) -> VerifyResult:
    """Check manifest, sizes, checksums, that HDF5 reads what the manifest describes, and weights in their source."""
    folder, num_bytes = store.folder(step), 0
    problems: list[str] = []
    readable = True
    try:
        with store.whole(step):
            manifest = patiently(lambda: store.manifest(step))
            num_bytes = manifest.num_bytes
            sound = []
            for index, shard in enumerate(manifest.shards):
                try:
                    patiently(partial(check_shard, folder, shard))
                    sound.append(index)
                except layout.DamagedCheckpoint as error:
                    problems.append(error.what)
            if sound:
                problems += hdf5_problems(folder, manifest, sound)
            if FROZEN in manifest.meta:
                record = FrozenRecord.parse(manifest.meta[FROZEN], f"{folder}, {FROZEN}")
                try:
                    FrozenSource(record, (0, 1), open_source).verify()
                except UserError as error:
                    problems.append(error.what)
    except layout.DamagedCheckpoint as error:
        problems.append(error.what)
    except (layout.UnreadableCheckpoint, UserError) as error:
        problems.append(error.what)
        readable = False
    said = (problem.replace(str(folder), store.where(step)) for problem in problems)
    return VerifyResult(step, store.where(step), num_bytes, tuple(said), readable)


def hdf5_problems(folder: Path, manifest: layout.Manifest, indices: Sequence[int]) -> list[str]:
    """Problems that a separate process finds in these shards, whose checksums were verified."""
    limit_s = LOOK_S + DATASET_S * sum(len(manifest.shards[index].pieces) for index in indices)
    words = [str(folder.absolute()), str(manifest.step), *map(str, indices)]
    try:
        done = subprocess.run(
            python.module("hpctrain.checkpoint.verify", *words),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=limit_s,
            env={**python.environment(), "OPENBLAS_NUM_THREADS": "1"},
        )
        output, ending = done.stdout, how_it_ended(done)
    except subprocess.TimeoutExpired as error:
        output, ending = error.stdout or b"", f"HDF5 did not finish reading it within {limit_s:g} s"
    answers: list[list[str]] = [json.loads(line) for line in output.splitlines(keepends=True) if line.endswith(b"\n")]
    problems = [problem for answer in answers for problem in answer]
    if len(answers) < len(indices):
        problems.append(f"{folder / manifest.shards[indices[len(answers)]].file}: {ending}")
    return problems


def how_it_ended(done: subprocess.CompletedProcess[bytes]) -> str:
    """Describe why the separate process gave no result."""
    if done.returncode < 0:
        return f"HDF5 crashes on it ({signal.Signals(-done.returncode).name})"
    return f"it could not be examined: {(done.stderr.decode(errors='replace').strip() or 'no reason given')[-300:]}"


def look(folder: Path, step: int, indices: Sequence[int]) -> None:
    """Print the problems of each shard as a line of JSON."""
    manifest = manifest_file.read(folder, step)
    for index in indices:
        shard = manifest.shards[index]
        foreign_text.show(json.dumps(shard_problems(folder / shard.file, shard)))


def shard_problems(path: Path, shard: layout.Shard) -> list[str]:
    """Differences between a shard's datasets and its entry in the manifest."""
    try:
        with h5py.File(path, "r", locking=False) as file:
            found = [dataset_problem(file, stored) for stored in shard.pieces]
    except (OSError, RuntimeError, LookupError, TypeError, ValueError) as error:
        return [f"{path}: HDF5 cannot read it: {error}"]
    return [f"{path} {problem}" for problem in found if problem]


def dataset_problem(file: h5py.File, stored: layout.StoredPiece) -> str | None:
    """The problem with one dataset, or None. Neither links nor external storage are followed."""
    piece = stored.piece
    dataset = own_dataset(file, piece.path)
    if dataset is None:
        return f"has no separate dataset {piece.path}"
    properties = dataset.id.get_create_plist()
    if properties.get_layout() != h5py.h5d.CONTIGUOUS or properties.get_external_count():
        return f"does not hold the bytes of {piece.path} itself, in one piece"
    if dataset.shape != piece.shape or dataset.dtype != layout.ITEM_TYPES[piece.tensor.dtype]:
        return f"has {piece.path} with another shape or type than the manifest"
    if piece.num_bytes and dataset.id.get_offset() != stored.offset:
        return f"has {piece.path} elsewhere than the manifest says"
    return None


if __name__ == "__main__":
    look(Path(sys.argv[1]), int(sys.argv[2]), [int(word) for word in sys.argv[3:]])
