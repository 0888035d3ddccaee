"""Replicated parameters, whose gradients are summed over the ranks that see different samples."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hpctrain.backends.torch.framework import TorchFramework
from hpctrain.backends.torch.reduce.reducer import TorchReducers
from hpctrain.backends.torch.reduce.sparse_parameters import sparse_parameters
from hpctrain.backends.torch.state.optimizer import Slots
from hpctrain.backends.torch.strategies.strategy import Opening, Prepared, Strategy, Updates
from hpctrain.parallel.memory_estimate import MemoryEstimate, TensorSize, of_state
from hpctrain.train.framework import HostBatch, samples_of


def planned(opening: Opening) -> Strategy:
    """Always applies: replicates what no earlier strategy has partitioned."""
    return functools.partial(replicate, opening)


def replicate(opening: Opening, prepared: Prepared) -> Prepared:
    """Makes every rank update all parameters that it has."""
    if prepared.updates is not None:
        return prepared
    model, config, partition = opening.model, opening.config.reduce, prepared.partition
    sparse = sparse_parameters(model, opening.parts, config.sparse)
    apart = [one for one in model.parameters() if id(one) in partition.complete]
    names, shares = opening.names(), opening.shares()
    slices = partition.slices
    slots = Slots({place: slices[name] for place, name in names.items() if name in slices})
    reducers = {name: TorchReducers(share, config, share.those_of(sparse), apart) for name, share in shares.items()}
    return dataclasses.replace(prepared, updates=Updates(shares, names, slots, reducers))


def measured(framework: TorchFramework, batch: HostBatch, ranks: int) -> tuple[Sequence[TensorSize], MemoryEstimate]:
    """Trains one step; returns the state and its memory estimate. Raises UserError if the model cannot be trained."""
    kept = SavedForBackward(one for group in (framework.model.parameters(), framework.model.buffers()) for one in group)
    with kept.weighing():
        framework.step([batch], samples_of(batch))
    state = [TensorSize.of(tensor) for tensor in framework.state()]
    return state, of_state(state, kept.num_bytes / samples_of(batch), ranks)


class SavedForBackward:
    """Measures the memory that autograd saves for backward, apart from parameters and buffers.

    Args:
        known: tensors that exist anyway.
    """

    def __init__(self, known: Iterator[Tensor]) -> None:
        self.known = {one.untyped_storage().data_ptr() for one in known}
        self.storages: dict[int, int] = {}
        """Bytes by address, so that what is saved twice counts once."""

    @property
    def num_bytes(self) -> int:
        """Total bytes."""
        return sum(self.storages.values())

    @contextlib.contextmanager
    def weighing(self) -> Iterator[None]:
        """Counts what passes in the body save; of a checkpointed layer, only its inputs."""
        with torch.autograd.graph.saved_tensors_hooks(self.note, lambda kept: kept):
            yield

    def note(self, tensor: Tensor) -> Tensor:
        """Counts a saved tensor. Its address stays unique until the backward pass, which saves nothing."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.known:
            self.storages[storage.data_ptr()] = storage.nbytes()
        return tensor
