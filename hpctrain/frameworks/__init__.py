"""One update, evaluation and state of a model, in PyTorch and in TensorFlow.

``torch`` and ``tensorflow`` each implement train.framework.Framework; what they have in common is beside them:
``update`` decides what happens to summed gradients, ``named_state`` loads and compares tensors by their names. Each
name below is imported when it is first used, so that no framework is loaded before.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpctrain.frameworks.named_state import load_tensors, plain_name
    from hpctrain.frameworks.seeding import seed_task
    from hpctrain.frameworks.update import UpdateResult

_MODULES = {
    "UpdateResult": "update",
    "load_tensors": "named_state",
    "plain_name": "named_state",
    "seed_task": "seeding",
}

__all__ = [
    "UpdateResult",
    "load_tensors",
    "plain_name",
    "seed_task",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'hpctrain.frameworks' has no attribute {name!r}")
    return getattr(importlib.import_module(f"hpctrain.frameworks.{_MODULES[name]}"), name)
