"""How gradients are summed over the ranks.

``candidates`` are the ways there are, and ``reducer_choice`` takes one. ``layout`` and ``exchange_slots`` say what
travels; ``mpi_allreduce``, ``shm_allreduce``, ``shm_pieces`` and ``ring_allreduce`` add it up in host memory, as
``host_allreduce`` opens them, and Horovod does wherever ``horovod_setup`` lets it. ``torch_reducer`` (with
``torch_gradients`` and ``torch_allreduce``) and ``tensorflow_reducer`` are what a framework gets. The names below are
for other rooms; each is imported when it is first used, so that no framework is loaded before.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpctrain.reduce.candidates import Candidate
    from hpctrain.reduce.exchange_slots import ExchangeResult
    from hpctrain.reduce.mpi_allreduce import FlatAllreduce, HostAllreduce
    from hpctrain.reduce.reducer_choice import Choice, ReducerChoice
    from hpctrain.reduce.ring_allreduce import RingAllreduce
    from hpctrain.reduce.shm_allreduce import open_shm_allreduce
    from hpctrain.reduce.tensorflow_pieces import Pieces
    from hpctrain.reduce.tensorflow_reducer import KerasReducers
    from hpctrain.reduce.tensorflow_sparse import Gradients
    from hpctrain.reduce.torch_reducer import TorchReducers

_MODULES = {
    "Candidate": "candidates",
    "Choice": "reducer_choice",
    "ExchangeResult": "exchange_slots",
    "FlatAllreduce": "mpi_allreduce",
    "Gradients": "tensorflow_sparse",
    "HostAllreduce": "mpi_allreduce",
    "KerasReducers": "tensorflow_reducer",
    "Pieces": "tensorflow_pieces",
    "ReducerChoice": "reducer_choice",
    "RingAllreduce": "ring_allreduce",
    "TorchReducers": "torch_reducer",
    "open_shm_allreduce": "shm_allreduce",
}

__all__ = [
    "Candidate",
    "Choice",
    "ExchangeResult",
    "FlatAllreduce",
    "Gradients",
    "HostAllreduce",
    "KerasReducers",
    "Pieces",
    "ReducerChoice",
    "RingAllreduce",
    "TorchReducers",
    "open_shm_allreduce",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'hpctrain.reduce' has no attribute {name!r}")
    return getattr(importlib.import_module(f"hpctrain.reduce.{_MODULES[name]}"), name)
