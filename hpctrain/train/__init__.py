"""The training loop, and what attaches to it. Knows no framework.

``loop`` trains by a ``framework``, whose protocol is there; ``hooks`` attach to it, and ``state`` says where a run
stands. ``plan`` says how long it trains, ``schedule`` and ``plateau`` set the learning rate, ``seeds`` the random
numbers; ``evaluation`` judges by ``metrics``, of which ``ranking`` and ``confusion`` are ready-made, ``profile``
traces, and ``flops`` says how much of a device's speed is used. ``in_step`` has ranks make equally many passes.
``reach`` and ``tree`` find and take apart what objects of the user's hold, and ``stateful`` is for those that say it
themselves. The names below are for other rooms; each is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpctrain.train.clock import IntervalClock, Phase, StepClock
    from hpctrain.train.early_stop import EarlyStop
    from hpctrain.train.framework import Framework, HostBatch, NonFiniteLoss, StepResult, Sums
    from hpctrain.train.hooks import BaseHook, Hook, StopReason
    from hpctrain.train.loop import RunSummary, Trainer
    from hpctrain.train.saved_arrays import SavedArrays
    from hpctrain.train.state import ArrayTensor, Cut, Placement, StateTensor, TrainState
    from hpctrain.train.training import Training
    from hpctrain.train.verify import VerifyWeights

_MODULES = {
    "ArrayTensor": "state",
    "BaseHook": "hooks",
    "Cut": "state",
    "EarlyStop": "early_stop",
    "Framework": "framework",
    "Hook": "hooks",
    "HostBatch": "framework",
    "IntervalClock": "clock",
    "NonFiniteLoss": "framework",
    "Phase": "clock",
    "Placement": "state",
    "RunSummary": "loop",
    "SavedArrays": "saved_arrays",
    "StateTensor": "state",
    "StepClock": "clock",
    "StepResult": "framework",
    "StopReason": "hooks",
    "Sums": "framework",
    "TrainState": "state",
    "Trainer": "loop",
    "Training": "training",
    "VerifyWeights": "verify",
}

__all__ = [
    "ArrayTensor",
    "BaseHook",
    "Cut",
    "EarlyStop",
    "Framework",
    "Hook",
    "HostBatch",
    "IntervalClock",
    "NonFiniteLoss",
    "Phase",
    "Placement",
    "RunSummary",
    "SavedArrays",
    "StateTensor",
    "StepClock",
    "StepResult",
    "StopReason",
    "Sums",
    "TrainState",
    "Trainer",
    "Training",
    "VerifyWeights",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'hpctrain.train' has no attribute {name!r}")
    return getattr(importlib.import_module(f"hpctrain.train.{_MODULES[name]}"), name)
