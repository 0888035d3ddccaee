"""Follow the memory of the tensors that exist."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Live(TorchDispatchMode):
    """Follows the memory of all tensors that operations take or return.

    Args:
        known: tensors that exist already.
        foreign: tensors over other processes' memory.
    """

    def __init__(self, known: Iterable[Tensor], foreign: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.foreign = {one.untyped_storage().data_ptr() for one in foreign}
        self.known: dict[int, StorageWeakRef] = {}
        self.peak = 0
        self.note(list(known))

    def note(self, tensors: Any) -> None:
        for one in tree_leaves(tensors):
            is_own = isinstance(one, Tensor) and not hasattr(one, "_local_tensor")
            if is_own and one.untyped_storage().data_ptr() not in (self.foreign or {}):
                self.known[one.untyped_storage()._cdata] = StorageWeakRef(one.untyped_storage())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.note((found, args, kwargs))
        there = {key: torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for key, ref in self.known.items()}
        self.known = {key: self.known[key] for key, storage in there.items() if storage is not None}
        self.peak = max(self.peak, sum(storage.nbytes() for storage in there.values() if storage is not None))
        return found
