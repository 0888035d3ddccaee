"""The format of a checkpoint, as docs/checkpoints.md describes it: values, manifest, shards, durable files.

The names below are for other rooms; each is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpctrain.checkpoint.format.files import BLOCK_BYTES, write_durably
    from hpctrain.checkpoint.format.layout import (
        ITEM_TYPES,
        DamagedCheckpoint,
        Manifest,
        Piece,
        Shard,
        TensorSpec,
        UnreadableCheckpoint,
    )
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
    "write_durably",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'hpctrain.checkpoint.format' has no attribute {name!r}")
    return getattr(importlib.import_module(f"hpctrain.checkpoint.format.{_MODULES[name]}"), name)
