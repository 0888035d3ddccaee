"""How much a forward pass keeps for the backward pass, and how much its layers hand on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Module

from hpctrain.frameworks.torch.dry_call import forward
from hpctrain.frameworks.torch.framework import TorchFramework, writable
from hpctrain.parallel.torch_stage import described, wants_gradient

if TYPE_CHECKING:
    from hpctrain.parallel.torch_pipeline import Stages
    from hpctrain.train.framework import HostBatch


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


class Lookups:
    """What passes ask tables for, and what of it would travel if others had the rows."""

    def __init__(self, tables: Sequence[Module]) -> None:
        self.tables = tables
        self.count = self.num_bytes = 0

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Counts those of forward passes in the body."""
        hooks = [one.register_forward_pre_hook(self.note, with_kwargs=True) for one in self.tables]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def note(self, table: Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Each row once: its index goes there, it comes here, and its gradient goes there again."""
        indices = given[0] if given else named["input"]
        weight = table.get_parameter("weight")
        row = weight.shape[1] * weight.element_size()
        self.count += 1
        self.num_bytes += indices.unique().numel() * (indices.element_size() + 2 * row)


class Chain:
    """Stands for a model in a forward pass: calls its layers, and notes what each stage hands on.

    Args:
        stages: of the model.
    """

    training = True

    def __init__(self, stages: Stages) -> None:
        self.layers = stages.layers
        self.ends = [own[-1] for own in stages.ranges[:-1]]
        self.num_bytes: list[int] = []
        """Of each stage but the last: of its activations, and of the gradients that come back."""

    def __call__(self, value: Any) -> Any:
        """The outputs."""
        for number, layer in enumerate(self.layers):
            value = layer.call(value)
            if number in self.ends:
                tensors: list[Tensor] = []
                described(value, tensors)
                self.num_bytes.append(sum(one.nbytes * (2 if wants_gradient(one) else 1) for one in tensors))
        return value


def handed_on(framework: TorchFramework, stages: Stages, batch: HostBatch) -> Sequence[int]:
    """Bytes that go over the end of each stage but the last in a forward and a backward pass, by a forward pass.

    Raises:
        UserError: the layers cannot be called one after the other, or hand on what cannot be sent.
    """
    chain, device, precision = Chain(stages), framework.device, framework.low_precision
    inputs = {name: writable(array).to(device) for name, array in batch.items()}
    with torch.autocast(device.type, precision) if precision else contextlib.nullcontext():
        forward(framework.task, chain, inputs)
    framework.tensor.leave()
    return chain.num_bytes
