"""How much a forward pass keeps for the backward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor


class Kept:
    """Memory that autograd holds, apart from parameters and buffers.

    Args:
        known: tensors that are there anyway.
    """

    def __init__(self, known: Iterator[Tensor]) -> None:
        self.known = {one.untyped_storage().data_ptr() for one in known}
        self.storages: dict[int, int] = {}
        """Bytes by address: what is saved twice is there once."""

    @property
    def num_bytes(self) -> int:
        """Of all."""
        return sum(self.storages.values())

    @contextlib.contextmanager
    def weighing(self) -> Iterator[None]:
        """Counts what passes in the body save; a layer that is computed again saves its inputs only."""
        with torch.autograd.graph.saved_tensors_hooks(self.note, lambda kept: kept):
            yield

    def note(self, tensor: Tensor) -> Tensor:
        """One that is saved. Its address is not another's before the backward pass has begun, which saves nothing."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.known:
            self.storages[storage.data_ptr()] = storage.nbytes()
        return tensor
