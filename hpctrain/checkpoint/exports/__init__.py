"""Weights of a checkpoint in the formats of other programs.

The names below are for other rooms; each is imported, with the framework that it needs, when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpctrain.checkpoint.exports.hugging_face import export_folder
    from hpctrain.checkpoint.exports.tensorflow_weights import export_keras
    from hpctrain.checkpoint.exports.torch_state_dict import export_state_dict
    from hpctrain.checkpoint.exports.weights import Selection, export_safetensors, model_weights, replace_whole

_MODULES = {
    "Selection": "weights",
    "export_folder": "hugging_face",
    "export_keras": "tensorflow_weights",
    "export_safetensors": "weights",
    "export_state_dict": "torch_state_dict",
    "model_weights": "weights",
    "replace_whole": "weights",
}

__all__ = [
    "Selection",
    "export_folder",
    "export_keras",
    "export_safetensors",
    "export_state_dict",
    "model_weights",
    "replace_whole",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'hpctrain.checkpoint.exports' has no attribute {name!r}")
    return getattr(importlib.import_module(f"hpctrain.checkpoint.exports.{_MODULES[name]}"), name)
