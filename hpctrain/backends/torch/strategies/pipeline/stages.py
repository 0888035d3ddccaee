"""Divides the layers of a PyTorch model into pipeline stages. Each rank keeps its stage's parameters in place, so that
names, optimizers and reducers stay the same."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Embedding, Module, Parameter, Sequential
from torch.optim import Optimizer

from hpctrain.backends.named_state import plain_name
from hpctrain.backends.torch.state.tensors import saved_buffers
from hpctrain.backends.torch.strategies.parameter_traits import replace_parameters
from hpctrain.backends.torch.strategies.pipeline.layer_parts import parts_of, used_by
from hpctrain.backends.torch.strategies.pipeline.stage_schedule import balanced
from hpctrain.errors import UserError, kind_of

FIELD = "layers= of the task"


@dataclass(frozen=True)
class Layer:
    """One of the steps from a model's input to its output."""

    call: Callable[[Any], Any]
    held: frozenset[int]
    """Ids of the parameters and buffers that it uses."""
    cost: float
    """Cost relative to other layers: the number of its parameters, except embedding tables."""
    is_trained: bool
    """Whether any of its parameters require gradients."""
    stage: int | None = None
    """Stage that the task assigns it to; None if the task does not."""


@dataclass(frozen=True)
class Stages:
    """The layers of each stage."""

    layers: Sequence[Layer]
    ranges: Sequence[range]
    """Layer numbers of each stage."""
    ranks: int
    """Number of ranks, which have the stages in turn."""

    @property
    def are_given(self) -> bool:
        """Whether the task assigns layers to stages."""
        return self.layers[0].stage is not None

    @property
    def counts(self) -> list[int]:
        """Number of layers in each stage."""
        return [len(own) for own in self.ranges]

    def of(self, rank: int) -> list[list[Layer]]:
        """The layers of each stage of a rank."""
        return [[self.layers[number] for number in own] for own in self.ranges[rank :: self.ranks]]

    def held(self, rank: int) -> frozenset[int]:
        """Ids of the parameters and buffers that a rank's layers use."""
        return frozenset[int]().union(*(layer.held for own in self.of(rank) for layer in own))

    def shares(self, rank: int) -> bool:
        """Whether several stages of a rank use one parameter."""
        of_stages = [frozenset[int]().union(*(layer.held for layer in own)) for own in self.of(rank)]
        return sum(map(len, of_stages)) > len(self.held(rank))


class StageModel(Module):
    """Calls the layers of a rank's stages, one after the other.

    Args:
        model: has their parameters.
        chunks: the layers of each stage.
    """

    def __init__(self, model: Module, chunks: Sequence[Sequence[Layer]]) -> None:
        super().__init__()
        self.model = model
        self.chunks = tuple(tuple(layer.call for layer in layers) for layers in chunks)

    def forward(self, value: Any, chunk: int) -> Any:
        """The value that the next stage gets."""
        for call in self.chunks[chunk]:
            value = call(value)
        return value

    def of_others(self, chunk: int) -> set[Module]:
        """Modules that only other stages of this rank use."""
        used = [
            {
                module
                for call in calls
                for part in parts_of(call)
                if isinstance(part, Module)
                for module in part.modules()
            }
            for calls in self.chunks
        ]
        return set[Module]().union(*used) - used[chunk]


def is_chain(model: Module) -> bool:
    """Whether a model only calls its children one after the other."""
    hooks = (model._forward_pre_hooks, model._forward_hooks, model._backward_pre_hooks, model._backward_hooks)
    is_plain = type(model).forward is Sequential.forward and "forward" not in vars(model)
    return isinstance(model, Sequential) and is_plain and not any(hooks)


def layers_of(model: Module, given: Callable[[Any], Sequence[Any]] | None) -> list[Layer]:
    """The layers of a model, in order.

    Args:
        model: any model, or a chain if ``given`` is None.
        given: ``layers`` of the task; None for a chain.

    Raises:
        UserError: they are not layers, or some parameter of the model is in none of them.
    """
    if given is None:
        assert isinstance(model, Sequential) and is_chain(model), "others are refused"
        calls: Sequence[Any] = list(model)
    else:
        calls = given(model)
    of_stages = stages_given(calls)
    calls = calls if of_stages is None else [call for own in of_stages for call in own]
    stage_of = [None] * len(calls) if of_stages is None else [at for at, own in enumerate(of_stages) for _ in own]
    tables = {id(one.weight) for one in model.modules() if isinstance(one, Embedding)}
    layers = []
    for number, (call, stage) in enumerate(zip(calls, stage_of, strict=True)):
        if isinstance(call, Module) and type(call).forward is Module.forward:
            raise UserError(
                f"layer {number} of {FIELD} is {kind_of(call)}, which holds layers and cannot be called",
                "give the layers that it holds: *model.blocks in place of model.blocks",
            )
        held = {id(one): one for one in used_by(call, model, f"layer {number} of {FIELD}")}
        parameters = [one for one in held.values() if isinstance(one, Parameter)]
        cost = sum(one.numel() for one in parameters if id(one) not in tables)
        layers.append(Layer(call, frozenset(held), cost, any(one.requires_grad for one in parameters), stage))
    for name, one in (*model.named_parameters(), *saved_buffers(model)):
        if not any(id(one) in layer.held for layer in layers):
            raise UserError(
                f"{name} of the model is in none of the layers that {FIELD} gives",
                "give the module that has it, or functools.partial(function, module) for a function that uses it",
            )
    return layers


def stages_given(calls: Any) -> Sequence[Sequence[Any]] | None:
    """The layers of each stage, if a task's ``layers`` returned a list per stage; None if it returned one flat list.

    Raises UserError if it returned neither.
    """
    if isinstance(calls, (list, tuple)) and calls:
        if all(map(callable, calls)):
            return None
        if all(isinstance(own, (list, tuple)) and all(map(callable, own)) for own in calls):
            empty = next((stage for stage, own in enumerate(calls) if not own), None)
            if empty is not None:
                what = f"{FIELD} gives stage {empty} no layers"
                raise UserError(what, "give each stage a layer with parameters to train, or leave its list out")
            return calls
    raise UserError(
        f"{FIELD} does not return a list of layers",
        "write layers=lambda model: [model.embed, *model.blocks], or return a list of layers for each stage",
    )


def staged(
    model: Module,
    layers: Sequence[Layer],
    ranks: int,
    chunks: int = 1,
    costs: Sequence[float] | None = None,
    together: Sequence[bool] = (),
) -> Stages:
    """Divides the layers into stages as the task assigns them, or evenly. Changes nothing.

    Args:
        model: the model.
        layers: its layers, in order.
        ranks: number of ranks.
        chunks: number of stages of each rank.
        costs: cost of each layer; by default, based on numbers of parameters.
        together: whether each layer must be in the same stage as the previous one; none by default.

    Raises:
        UserError: the task assigns layers to another number of stages, or a stage trains nothing; there are too few
            layers that can be separated; or two stages would have the same buffer.
    """
    users = users_of(model, layers)
    trained = [layer.is_trained for layer in layers]
    stages = ranks * chunks
    asked = asked_for(ranks, chunks)
    ranges = given_ranges(layers, ranks, chunks)
    if ranges is None:
        costs = [layer.cost for layer in layers] if costs is None else costs
        parameters = {name for name, _ in model.named_parameters()}
        buffers = {name: own for name, own in users.items() if name not in parameters}
        for shared in (users, buffers, {}):  # a parameter of several stages costs memory and messages
            tied = joined(layers, shared)
            kept = list(map(operator.or_, tied, together)) if together else tied
            ranges = ranges or balanced(costs, trained, stages, kept)
        if ranges is None and any(together) and balanced(costs, trained, stages):
            raise UserError(
                f"{asked}, and layer {together.index(True) - 1} of {FIELD} passes on a value "
                "that another rank could not use",
                "let layers pass on tensors, by themselves or in tuples, lists and dicts",
            )
    if ranges is None:
        count = sum(trained)
        key, most = ("pipeline_chunks", count // ranks) if chunks > 1 and ranks <= count else ("pipeline", count)
        raise UserError(
            f"{asked}, and the model has {count} {'layer' if count == 1 else 'layers'} with parameters to train",
            f"choose a parallel.{key} of {max(most, 1)} or less, or give finer layers",
        )
    wrong = shared_buffer(model, layers, ranges)
    if wrong is not None:
        name, found = wrong
        raise UserError(
            f"{name}, a buffer, is used by layers in stages {found[0]} and {found[1]} of the pipeline",
            "give each layer its own, choose a parallel.pipeline that leaves these layers in one stage, or use "
            "parallel.shard: parameters or parallel.tensor in place of parallel.pipeline",
        )
    return Stages(layers, ranges, ranks)


def asked_for(ranks: int, chunks: int) -> str:
    """Says how many stages the run file asks for, for messages."""
    return f"parallel.pipeline is {ranks}" + (f" and parallel.pipeline_chunks {chunks}" if chunks > 1 else "")


def given_ranges(layers: Sequence[Layer], ranks: int, chunks: int) -> list[range] | None:
    """Layer numbers of each stage as the task assigns them, if it does. Raises UserError if they do not fit."""
    given = [layer.stage for layer in layers if layer.stage is not None]
    if not given:
        return None
    count = given[-1] + 1
    if count != ranks * chunks:
        what = f"{FIELD} gives the layers of {count} {'stage' if count == 1 else 'stages'}"
        keys = f"parallel.pipeline: {count}" + (" without parallel.pipeline_chunks" if chunks > 1 else "")
        fix = f"set {keys}, or return one list of all layers, which are divided by their times"
        raise UserError(f"{what}, and {asked_for(ranks, chunks)}", fix)
    ranges = []
    for stage in range(count):
        begin = given.index(stage)
        own = range(begin, begin + given.count(stage))
        if not any(layers[number].is_trained for number in own):
            what = f"stage {stage}, as {FIELD} gives it, has no parameter to train"
            raise UserError(what, "give each stage a layer with parameters to train")
        ranges.append(own)
    return ranges


def users_of(model: Module, layers: Sequence[Layer]) -> dict[str, list[int]]:
    """Numbers of the layers that use each parameter and each saved buffer, by name."""
    return {
        name: [number for number, layer in enumerate(layers) if id(one) in layer.held]
        for name, one in (*model.named_parameters(), *saved_buffers(model))
    }


def holders_of(model: Module, layers: Sequence[Layer], ranges: Sequence[range]) -> dict[str, list[int]]:
    """Stages of each parameter and buffer that several stages use, by name."""
    found = {}
    for name, own in users_of(model, layers).items():
        stages = [stage for stage, numbers in enumerate(ranges) if not set(own).isdisjoint(numbers)]
        if len(stages) > 1:
            found[name] = stages
    return found


def shared_buffer(model: Module, layers: Sequence[Layer], ranges: Sequence[range]) -> tuple[str, list[int]] | None:
    """Name and stages of a buffer that several stages use, if any: nothing would keep its copies equal."""
    parameters = {name for name, _ in model.named_parameters()}
    found = holders_of(model, layers, ranges)
    return next(((name, own) for name, own in found.items() if name not in parameters), None)


def tied_parameters(model: Module, stages: Stages) -> dict[str, list[int]]:
    """Ranks of each parameter that the stages of several ranks use, by plain name."""
    holders = holders_of(model, stages.layers, stages.ranges)
    found = {plain_name(name): sorted({stage % stages.ranks for stage in own}) for name, own in holders.items()}
    return {name: ranks for name, ranks in found.items() if len(ranks) > 1}


def joined(layers: Sequence[Layer], users: Mapping[str, Sequence[int]]) -> list[bool]:
    """Whether each layer must be in the previous one's stage: it or a later one shares a tensor with an earlier one."""
    found = [False] * len(layers)
    for own in users.values():
        for number in range(min(own, default=0) + 1, max(own, default=0) + 1):
            found[number] = True
    return found


def as_before(model: Module, planned: Stages, counts: Sequence[int]) -> Stages | None:
    """The stages of an earlier attempt with these layer counts; None if they do not fit the model or the run."""
    layers = planned.layers
    if len(counts) != len(planned.ranges) or min(counts) < 1 or sum(counts) != len(layers):
        return None
    ranges = [range(end - own, end) for own, end in zip(counts, itertools.accumulate(counts), strict=True)]
    trains = all(any(layers[number].is_trained for number in own) for own in ranges)
    return (
        dataclasses.replace(planned, ranges=ranges) if trains and shared_buffer(model, layers, ranges) is None else None
    )


def keep_stages(model: Module, stages: Stages, rank: int, optimizers: Sequence[Optimizer]) -> list[Tensor]:
    """Removes the parameters and buffers of other ranks' stages from a model and its optimizers, in place.

    Args:
        model: whole.
        stages: the division of its layers.
        rank: the rank whose stages to keep.
        optimizers: optimizers that update parameters themselves.

    Returns:
        The removed tensors, with their memory freed.
    """
    others = frozenset[int]().union(*(layer.held for layer in stages.layers)) - stages.held(rank)
    gone: dict[int, Tensor] = {}
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            values: Mapping[str, Tensor | None] = table
            for name in [name for name, one in values.items() if id(one) in others]:
                gone[id(values[name])] = table[name]  # type: ignore[assignment]
                table[name] = None
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            replace_parameters(optimizer, group, dict.fromkeys(gone))
    for tensor in gone.values():
        tensor.grad = None
        tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return list(gone.values())
