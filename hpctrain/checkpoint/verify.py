"""Verifies a checkpoint in one process, which reads all of it block by block."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from hpctrain.checkpoint.format.layout import DamagedCheckpoint, UnreadableCheckpoint
from hpctrain.checkpoint.format.shard_reading import check_shard
from hpctrain.checkpoint.frozen import FROZEN, FrozenRecord, FrozenSource
from hpctrain.checkpoint.read_retry import retry_read
from hpctrain.checkpoint.reading import open_source
from hpctrain.checkpoint.store import CheckpointStore
from hpctrain.errors import UserError


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
    """Check manifest, sizes, indexes and checksums, also those of frozen weights in their source."""
    folder, num_bytes = store.folder(step), 0
    problems: list[str] = []
    readable = True
    try:
        with store.whole(step):
            manifest = retry_read(lambda: store.manifest(step))
            num_bytes = manifest.num_bytes
            for shard in manifest.shards:
                try:
                    retry_read(partial(check_shard, folder, shard))
                except DamagedCheckpoint as error:
                    problems.append(error.what)
            if FROZEN in manifest.meta:
                record = FrozenRecord.of(manifest.meta, folder)
                try:
                    FrozenSource(record, (0, 1), open_source).verify()
                except UserError as error:
                    problems.append(error.what)
    except DamagedCheckpoint as error:
        problems.append(error.what)
    except (UnreadableCheckpoint, UserError) as error:
        problems.append(error.what)
        readable = False
    said = (problem.replace(str(folder), store.where(step)) for problem in problems)
    return VerifyResult(step, store.where(step), num_bytes, tuple(said), readable)
