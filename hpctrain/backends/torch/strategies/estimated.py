"""The starting point of a strategy's memory estimate: a model that was trained for one step without the strategy."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter

from hpctrain.backends.torch.strategies.memory_estimate import MemoryEstimate, TensorSize, of_state
from hpctrain.backends.torch.strategies.parameter_traits import ParameterTraits, traits_of, unsuited
from hpctrain.backends.torch.task.checks import model_features
from hpctrain.backends.torch.task.shares import Share, shares_of
from hpctrain.backends.torch.torch_framework import TorchFramework
from hpctrain.backends.torch.torch_metrics import of_torchmetrics
from hpctrain.config.combinations import refuse
from hpctrain.config.features import Feature, Uses, used
from hpctrain.config.sections import ParallelConfig
from hpctrain.train.framework import HostBatch, samples_of


@dataclass(frozen=True)
class Estimated:
    """A model, and a plan of a run with it."""

    framework: TorchFramework
    """A closed framework, with the model and whole optimizers that have made no step."""
    state: Sequence[TensorSize]
    """Sizes of the state after one step."""
    whole: MemoryEstimate
    """Estimate without the strategy."""
    features: Mapping[Feature, Any]
    """Features of the run file with this plan."""
    data: int
    """Number of data-parallel ranks."""
    rows: int
    """Those of them over which rows of parameters are divided."""
    pipeline: int
    """Number of pipeline stages."""
    micro_batches: int
    """Micro-batches per update."""
    parallel: ParallelConfig
    """What the run file asks for."""
    held: Container[int] | None = None
    """Ids of the parameters that a rank has; None: all."""

    @property
    def parameters(self) -> list[Parameter]:
        """The parameters that a rank has."""
        return [one for one in self.framework.model.parameters() if self.held is None or id(one) in self.held]

    @property
    def shares(self) -> Mapping[str, Share]:
        """The same with their names, by optimizer."""
        framework = self.framework
        own = {id(one) for one in self.parameters}
        found = shares_of(framework.task, framework.model, framework.source.optimizer_state.every)
        return {
            optimizer: Share([(name, one) for name, one in share.pairs if id(one) in own])
            for optimizer, share in found.items()
        }

    @cached_property
    def traits(self) -> ParameterTraits:
        """How optimizers may be partitioned. Raises UserError, with the reason, if the model cannot be."""
        self.refuse({})
        traits = traits_of(self.framework.source.optimizer_state.every)
        self.refuse({Feature.UNKNOWN_OPTIMIZER: traits.unknown})
        return traits

    def refuse(self, found: Uses) -> None:
        """Raises Refused if the plan does not work with the model, its optimizers, or the given features."""
        framework, task = self.framework, self.framework.task
        parts = framework.source.optimizer_state.every
        unfit = unsuited(parts, framework.source.task_state)
        of_task = {Feature.TORCH_METRICS: of_torchmetrics(task), Feature.OWN_STEP: task.step is not None}
        of_model = model_features(framework.model, parts, False, self.data, unfit)
        refuse({**self.features, **of_model, **used({**of_task, **found})})


Estimate: TypeAlias = Callable[[Estimated], MemoryEstimate | None]
"""Estimates the rank with the most memory; returns None if there is nothing to partition. Raises UserError, with the
reason, if the model cannot be partitioned."""


def measured(framework: TorchFramework, batch: HostBatch, ranks: int) -> tuple[Sequence[TensorSize], MemoryEstimate]:
    """Trains one step; returns the state and its memory estimate. Raises UserError if the model cannot be trained."""
    kept = SavedForBackward(one for group in (framework.model.parameters(), framework.model.buffers()) for one in group)
    with kept.weighing():
        framework.step([batch], samples_of(batch))
    state = [TensorSize.of(tensor) for tensor in framework.state()]
    whole = of_state(state, kept.num_bytes / samples_of(batch), ranks)
    return state, replace(whole, copies=sum(kept.copies.values()))


CASTS = ("ToCopyBackward0", "TBackward0", "TransposeBackward0", "PermuteBackward0", "ViewBackward0")
"""Operations of autograd between a parameter and the copy of it that a layer computes with."""


class SavedForBackward:
    """Measures the memory that autograd saves for backward, apart from parameters and buffers.

    Args:
        known: tensors that exist anyway.
    """

    def __init__(self, known: Iterator[Tensor]) -> None:
        self.known = {one.untyped_storage().data_ptr() for one in known}
        self.storages: dict[int, int] = {}
        """Bytes by address, so that what is saved twice counts once."""
        self.copies: dict[int, int] = {}
        """The same of copies of parameters in another type, which do not grow with the batch."""

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
            kind = self.copies if self.is_copy(tensor) else self.storages
            kind[storage.data_ptr()] = storage.nbytes()
        return tensor

    def is_copy(self, tensor: Tensor) -> bool:
        """Whether a tensor is a trained parameter in another type, possibly transposed."""
        step: Any = tensor.grad_fn
        while step is not None and step.name() in CASTS:
            step = step.next_functions[0][0]
        return hasattr(step, "variable") and step.variable.untyped_storage().data_ptr() in self.known
