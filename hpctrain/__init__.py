"""Batch training of neural networks on HPC clusters: Horovod and MPI, HDF5, Slurm.

The names below are imported when they are first used, so that ``import hpctrain`` loads no framework and no MPI.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from hpctrain.comm.world import World, connect
    from hpctrain.tasks.definition import KerasTask, TorchTask

_HOMES = {
    "World": "hpctrain.comm.world",
    "connect": "hpctrain.comm.world",
    "TorchTask": "hpctrain.tasks.definition",
    "KerasTask": "hpctrain.tasks.definition",
}

__all__ = ["KerasTask", "TorchTask", "World", "__version__", "connect"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'hpctrain' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
