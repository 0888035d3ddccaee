"""State of a run saved to HDF5 while training continues, verified when it is read, and resumed from.

``store`` is for everybody, ``hook`` for training runs; ``saver`` writes in the background, ``folder`` commits,
``format`` is what lies on the disk, ``exports`` gives weights to other programs. The names below are for other rooms;
each is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpctrain.checkpoint.format.layout import DamagedCheckpoint, UnreadableCheckpoint
    from hpctrain.checkpoint.hook import CheckpointHook, checkpoint_hook
    from hpctrain.checkpoint.initial import load_initial
    from hpctrain.checkpoint.initial_match import Source
    from hpctrain.checkpoint.inspect import summary_tree, tensor_differences, tensor_summaries
    from hpctrain.checkpoint.policy import Retention
    from hpctrain.checkpoint.reading import Loaded
    from hpctrain.checkpoint.resume import load_weights
    from hpctrain.checkpoint.saver import Outcome, Saver, array_tensors
    from hpctrain.checkpoint.store import CheckpointStore, locate, open_saver
    from hpctrain.checkpoint.verify import verify_checkpoint

_MODULES = {
    "CheckpointHook": "hook",
    "CheckpointStore": "store",
    "DamagedCheckpoint": "format.layout",
    "Loaded": "reading",
    "Outcome": "saver",
    "Retention": "policy",
    "Saver": "saver",
    "Source": "initial_match",
    "UnreadableCheckpoint": "format.layout",
    "array_tensors": "saver",
    "checkpoint_hook": "hook",
    "load_initial": "initial",
    "load_weights": "resume",
    "locate": "store",
    "open_saver": "store",
    "summary_tree": "inspect",
    "tensor_differences": "inspect",
    "tensor_summaries": "inspect",
    "verify_checkpoint": "verify",
}

__all__ = [
    "CheckpointHook",
    "CheckpointStore",
    "DamagedCheckpoint",
    "Loaded",
    "Outcome",
    "Retention",
    "Saver",
    "Source",
    "UnreadableCheckpoint",
    "array_tensors",
    "checkpoint_hook",
    "load_initial",
    "load_weights",
    "locate",
    "open_saver",
    "summary_tree",
    "tensor_differences",
    "tensor_summaries",
    "verify_checkpoint",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'hpctrain.checkpoint' has no attribute {name!r}")
    return getattr(importlib.import_module(f"hpctrain.checkpoint.{_MODULES[name]}"), name)
