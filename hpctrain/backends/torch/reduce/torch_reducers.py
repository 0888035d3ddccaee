"""Opens reducers of a torch model, and chooses one."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import Module, Parameter

from hpctrain.backends.torch.process_groups import each_has_a_gpu, peers_of, word_of
from hpctrain.backends.torch.reduce import allreduce, messages
from hpctrain.backends.torch.reduce.gradients import FlatGradients, SparseGradients, as_real
from hpctrain.backends.torch.reduce.reducer import FlatReducer, NoReducer, Reducer
from hpctrain.backends.torch.reduce.streamed_reducer import StreamedReducer
from hpctrain.comm.group import Group
from hpctrain.comm.world import World
from hpctrain.config.sections import ReduceConfig
from hpctrain.errors import UserError
from hpctrain.reduce import horovod_setup
from hpctrain.reduce.candidates import Candidate, candidates, look_around
from hpctrain.reduce.flat_layout import BUCKET_BYTES, END_BYTES, GPU_BUCKET_BYTES, SLOTS, Layout, plan
from hpctrain.reduce.reducer_choice import Choice, ReducerChoice
from hpctrain.reduce.streamed_allreduce import PIECE_BYTES


class Parameters(Protocol):
    """A module, or some of its parameters."""

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Names and parameters, in a fixed order."""


def divided(
    named: Sequence[tuple[str, Parameter]], sparse: Container[int]
) -> tuple[list[tuple[str, Parameter]], list[Parameter]]:
    """Divides parameters into (name, parameter) pairs with dense gradients, and those whose ids are in ``sparse``."""
    dense = [(name, parameter) for name, parameter in named if id(parameter) not in sparse]
    return dense, [parameter for _, parameter in named if id(parameter) in sparse]


@dataclass(frozen=True)
class TorchReducerFactory:
    """Reducers of one model, which must be on its device already; see reducer_choice.ReducerFactory."""

    model: Parameters
    """A module, whose parameters count that require gradients; or some parameters, which all count."""
    config: ReduceConfig
    sparse: Sequence[Parameter] = ()
    """Parameters whose gradients stay sparse."""
    needs_norm: bool = False
    """Whether each update needs the norm of these gradients."""
    by_parts: bool = False
    """Whether the optimizer may update some of the parameters while gradients of others are under way."""

    def possible(self, config: ReduceConfig, world: World) -> list[Candidate]:
        device = next((parameter.device for _, parameter in self.model.named_parameters()), torch.device("cpu"))

        def has_horovod() -> bool:  # called on all ranks or on none
            there = world.data.allgather(horovod_setup.available("torch"), "look for Horovod")
            return all(there) and messages.unfit(horovod_setup.load("torch"), world.data, device) is None

        on_gpu = device.type != "cpu"
        own_gpus = each_has_a_gpu(world, device)
        return candidates(config, look_around(config, world, on_gpu, has_horovod, word_of(device), own_gpus))

    def open(self, candidate: Candidate, group: Group) -> Reducer:
        """Opens a candidate's reducer. Collective over the group.

        Raises:
            UserError: Horovod is missing or does not fit.
        """
        is_share = not isinstance(self.model, Module)  # its parameters may be frozen now and trained again later
        wanted = [(name, one) for name, one in self.model.named_parameters() if is_share or one.requires_grad]
        parameters, rows_of = divided(wanted, {id(parameter) for parameter in self.sparse})
        sparse = self.config.sparse
        if candidate.kind == "none":
            return NoReducer(parameters, SparseGradients(rows_of), sparse, self.needs_norm)
        dtype, device = common_kind(wanted)
        sizes = [as_real(one).numel() for _, one in parameters]
        candidate, sum_, layout = self._flat_sum(candidate, group, sizes, dtype, device)
        by_parts = self.by_parts and not rows_of and all(one.dtype.to_real() == dtype for _, one in parameters)
        arrive = sum_.arrive if by_parts and isinstance(sum_, allreduce.HostTensorAllreduce) else None
        end = layout.length if arrive is None else layout.gradients

        def ready(number: int) -> None:
            sum_.start(layout.buckets[number].begin, min(layout.buckets[number].end, end))

        elsewhere = sum_.elsewhere if isinstance(sum_, messages.MessageAllreduce) else None
        gradients = FlatGradients(parameters, sum_.flat, layout, ready, sparse, elsewhere)
        if arrive is not None:
            return StreamedReducer(candidate.name, gradients, sum_, arrive)
        by_host = not rows_of or candidate.kind in ("mpi", "horovod")
        tables = SparseGradients(rows_of, group if by_host else peers_of(group, device), dtype)
        return FlatReducer(candidate.name, gradients, sum_, tables, self.needs_norm)

    def _flat_sum(
        self, candidate: Candidate, group: Group, sizes: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> tuple[Candidate, allreduce.TensorAllreduce, Layout]:
        """Opens the sum of gradients of these sizes; returns it with the candidate used, and their layout."""
        most, ends = bucket_sizes(self.config, candidate, dtype, device)
        if candidate.kind == "mpi":
            layout = plan(sizes, most, SLOTS, ends)
            return *allreduce.open_tensor_allreduce(candidate, group, layout, dtype, device), layout
        least = math.inf
        sender: messages.GroupSender | messages.HorovodSender
        if candidate.kind == "horovod":
            sender = messages.horovod_sender(group, device, sum(sizes))
            if candidate.compression == "none" and device.type == "cpu":
                least = sender.apart(sum(sizes), dtype.itemsize)
        else:
            sender = messages.GroupSender(peers_of(group, device))
        layout = plan(sizes, most, SLOTS, ends, least)
        half = messages.HALVES.get(candidate.compression)
        return candidate, messages.MessageAllreduce(sender, layout, dtype, device, half), layout


def bucket_sizes(
    config: ReduceConfig, candidate: Candidate, dtype: torch.dtype, device: torch.device
) -> tuple[int | None, int | None]:
    """Elements of buckets, and of the first and last one if they differ; None for a candidate that has no buckets."""
    if candidate.way != "overlap":
        return None, None
    on_gpu = device.type != "cpu"
    most = config.bucket_bytes or (GPU_BUCKET_BYTES if on_gpu else BUCKET_BYTES)
    most = min(most, PIECE_BYTES) if candidate.kind == "mpi" else most
    return max(1, most // dtype.itemsize), max(1, min(most, END_BYTES) // dtype.itemsize) if on_gpu else None


def measured_reducer(
    config: ReduceConfig,
    world: World,
    model: Module,
    rehearse: Callable[[Reducer], object],
    chosen: str | None = None,
    announce: Callable[[Choice], object] | None = None,
    sparse: Sequence[Parameter] = (),
) -> Reducer:
    """Opens the reducer that the configuration names or, for ``auto``, the fastest one here. Collective.

    Args:
        config: the run file's reduce section.
        world: the ranks.
        model: its parameters must be on their device already.
        rehearse: runs forward, backward and ``exchange`` once with the given reducer, and leaves the model as it was.
        chosen: name of an earlier choice, to be used without measuring.
        announce: called with the result if candidates were measured.
        sparse: tables whose gradients stay sparse, so that only rows are sent; others are made dense.

    Raises:
        UserError: the configured kind cannot be used here, for example Horovod that is not installed.
    """
    return ReducerChoice(config, world, chosen, announce).reducer(TorchReducerFactory(model, config, sparse), rehearse)


def common_kind(parameters: Sequence[tuple[str, Parameter]]) -> tuple[torch.dtype, torch.device]:
    """The dtype in which gradients are summed, and their device."""
    if not parameters:
        raise UserError(
            "the model has no parameter that requires a gradient", "leave requires_grad on for what is to be trained"
        )
    devices = {parameter.device for _, parameter in parameters}
    if len(devices) > 1:
        raise UserError(
            f"the model is spread over {len(devices)} devices", "put all parameters of a rank on one device"
        )
    wide = any(parameter.dtype.to_real() == torch.float64 for _, parameter in parameters)
    return torch.float64 if wide else torch.float32, devices.pop()
