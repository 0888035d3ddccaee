"""PyTorch: ``framework`` trains a model; ``state``, ``optimizer`` (one or several) and ``holdings`` name its tensors.

``opening`` brings a task's model to the device, after ``checks`` has looked at it. ``losses``, ``metrics``,
``scheduler`` and ``shares`` adapt what a task brings; ``updates`` is one optimizer's part of a step, ``step_context``
what a task's own step calls, and ``own_step`` what becomes of it. ``sharding`` leaves each rank's optimizers, or all
of the model, a part of the parameters, and ``pipelined`` is one stage of a model; ``valueless`` gives memory to
models that are made without. ``carried`` is the state of recurrent networks, and ``recompute`` repeats layers in the
backward pass. ``sync_batchnorm`` and ``sparse`` are for layers that need more of the other ranks. ``profiler`` writes
traces, and ``activations`` weighs what a forward pass keeps.
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
