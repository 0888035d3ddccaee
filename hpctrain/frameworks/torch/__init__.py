"""PyTorch: ``framework`` trains a model; ``state``, ``optimizer`` and ``holdings`` name its tensors.

``losses``, ``scheduler`` and ``shares`` adapt what a task brings; ``updates`` is one optimizer's part of a step, and
``own_step`` what a task's own step does with it. ``profiler`` writes traces.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpctrain.frameworks.torch.framework import TorchFramework
    from hpctrain.frameworks.torch.state import digest

_MODULES = {
    "TorchFramework": "framework",
    "digest": "state",
}

__all__ = [
    "TorchFramework",
    "digest",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'hpctrain.frameworks.torch' has no attribute {name!r}")
    return getattr(importlib.import_module(f"hpctrain.frameworks.torch.{_MODULES[name]}"), name)
