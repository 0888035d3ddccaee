"""The format of a checkpoint, as docs/checkpoints.md describes it: layout, manifest, shards, durable files.

``manifest`` and ``shard_index`` tell what shards hold; ``shard`` writes them and ``shard_reading`` reads parts of them.

The names below are for other rooms; each is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpctrain.checkpoint.format.checksum import crc32
    from hpctrain.checkpoint.format.files import BLOCK_BYTES, created, write_block, write_durably
    from hpctrain.checkpoint.format.layout import (
        ITEM_TYPES,
        DamagedCheckpoint,
        Manifest,
        Piece,
        Shard,
        TensorSpec,
        UnreadableCheckpoint,
    )
    from hpctrain.checkpoint.format.paced_write import threads
    from hpctrain.checkpoint.format.strict_json import Reader

_MODULES = {
    "BLOCK_BYTES": "files",
    "DamagedCheckpoint": "layout",
    "ITEM_TYPES": "layout",
    "Manifest": "layout",
    "Piece": "layout",
    "Reader": "strict_json",
    "Shard": "layout",
    "TensorSpec": "layout",
    "UnreadableCheckpoint": "layout",
    "crc32": "checksum",
    "created": "files",
    "threads": "paced_write",
    "write_block": "files",
    "write_durably": "files",
}

__all__ = [
    "BLOCK_BYTES",
    "ITEM_TYPES",
    "DamagedCheckpoint",
    "Manifest",
    "Piece",
    "Reader",
    "Shard",
    "TensorSpec",
    "UnreadableCheckpoint",
    "crc32",
    "created",
    "threads",
    "write_block",
    "write_durably",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'hpctrain.checkpoint.format' has no attribute {name!r}")
    return getattr(importlib.import_module(f"hpctrain.checkpoint.format.{_MODULES[name]}"), name)
