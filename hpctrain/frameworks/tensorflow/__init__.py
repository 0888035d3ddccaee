"""Keras on TensorFlow: ``opening`` makes of a task a ``framework``, which trains its model by the functions of
``passes`` and ``step``; ``state`` and ``holdings`` name its variables, and ``sharding`` leaves each rank some rows
of them to update. ``runtime`` settles what TensorFlow reads before it starts, and loads none of it; ``losses`` and
``compiled`` adapt what a task and its model bring, ``own_step`` trains models by a ``train_step`` of their own, and
``profiler`` writes traces.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpctrain.frameworks.tensorflow.compiled import adopted
    from hpctrain.frameworks.tensorflow.framework import KerasFramework
    from hpctrain.frameworks.tensorflow.overrides import trains_itself
    from hpctrain.frameworks.tensorflow.state import model_tensors
    from hpctrain.frameworks.tensorflow.weights import build_weights, lacks_weights

_MODULES = {
    "KerasFramework": "framework",
    "adopted": "compiled",
    "build_weights": "weights",
    "trains_itself": "overrides",
    "lacks_weights": "weights",
    "model_tensors": "state",
}

__all__ = [
    "KerasFramework",
    "adopted",
    "build_weights",
    "lacks_weights",
    "model_tensors",
    "trains_itself",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'hpctrain.frameworks.tensorflow' has no attribute {name!r}")
    return getattr(importlib.import_module(f"hpctrain.frameworks.tensorflow.{_MODULES[name]}"), name)
