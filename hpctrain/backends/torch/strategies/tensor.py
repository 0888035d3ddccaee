"""``parallel.tensor``: layers split, in place, over the ranks of a tensor group, which see the same samples."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor
from torch.nn import Embedding, Linear, Module, ModuleDict, ModuleList, Sequential
from torch.nn.functional import linear
from torch.nn.modules.dropout import _DropoutNd

from hpctrain.backends.torch.strategies.parameter_traits import require_elementwise
from hpctrain.backends.torch.strategies.partition import Partition, Slices
from hpctrain.backends.torch.strategies.split_values import plain, take_in_compiled_functions
from hpctrain.backends.torch.strategies.strategy import PreparedModel, Strategy, StrategyContext
from hpctrain.backends.torch.strategies.tp_group import (
    CutLogits,
    TPGroup,
    gathered,
    spread,
)
from hpctrain.comm.group import Group
from hpctrain.errors import UserError, kind_of
from hpctrain.tasks.definition import LayerCut
from hpctrain.train.clock import Neighbours
from hpctrain.train.state import Tiling

KINDS: Mapping[str, type[Module]] = {"columns": Linear, "rows": Linear, "vocabulary": Embedding}
"""The type of layers that can be split by each word."""
CONTAINERS = (ModuleList, ModuleDict, Sequential)
"""Modules of torch.nn that only call their layers; others may access weights directly."""


@dataclass(frozen=True)
class CutLayer:
    """A layer, and how it is split."""

    name: str
    layer: Module
    word: LayerCut
    drops: bool = True
    """Whether the model may draw random numbers between split layers."""

    def axes(self) -> dict[str, int]:
        """The axis along which each parameter is split; parameters that are left out stay whole."""
        if self.word.kind == "columns":
            return {"weight": 0, "bias": 0} if self.layer.bias is not None else {"weight": 0}
        return {"weight": 1 if self.word.kind == "rows" else 0}


def layers_to_cut(model: Module, words: Mapping[str, Any], ranks: int) -> list[CutLayer]:
    """Selects the layers to split; changes nothing.

    Args:
        model: the model.
        words: how to split layers, by patterns of their names, such as ``blocks.*.up``.
        ranks: size of a tensor group; 1 splits nothing.

    Raises:
        UserError: a pattern names no layer, or one that cannot be split this way.
    """
    if ranks == 1:
        return []
    layers = named_layers(model, words)
    for one in layers:
        require_divisible(one.name, one.layer, one.word, ranks)
    require_same_cut(model, layers)
    return layers


def named_layers(model: Module, words: Mapping[str, Any]) -> list[CutLayer]:
    """The layers that a task names, and how to split them.

    Args:
        model: the model.
        words: how to split layers, by patterns of their names.

    Raises:
        UserError: a pattern names no layer, or one that cannot be split this way.
    """
    layers: dict[str, CutLayer] = {}
    parents = {
        f"{name}.{child}".lstrip("."): one for name, one in model.named_modules() for child, _ in one.named_children()
    }
    drops = has_dropout(model)
    for pattern, word in words.items():
        if not isinstance(word, LayerCut):
            what = f"tensor[{pattern!r}] of the task is {kind_of(word)}"
            raise UserError(what, "write hpctrain.columns, hpctrain.rows or hpctrain.vocabulary")
        found = [(name, layer) for name, layer in model.named_modules() if name and fnmatchcase(name, pattern)]
        if not found:
            able = [name for name, layer in model.named_modules() if type(layer) in KINDS.values()]
            raise UserError(
                f"tensor= of the task: no layer of the model is called {pattern}",
                f"its layers that can be split are: {', '.join(able[:20]) or 'none'}{' ...' if len(able) > 20 else ''}",
            )
        for name, layer in found:
            if name in layers and layers[name].word != word:
                raise UserError(f"tensor= of the task names {name} twice, and splits it differently", "name it once")
            require_able(name, layer, parents[name], word)
            layers[name] = CutLayer(name, layer, word, drops)
    return list(layers.values())


def has_dropout(model: Module) -> bool:
    """Whether a model has Dropout layers, or modules with a number named like one, such as ``attention_dropout``."""
    values = [(name, value) for module in model.modules() for name, value in vars(module).items()]
    values += [("drop", module.p) for module in model.modules() if isinstance(module, _DropoutNd)]
    return any("drop" in name and isinstance(value, float) and value > 0 for name, value in values)


def tilings(model: Module, words: Mapping[str, Any], plain: Callable[[str], str]) -> dict[str, Tiling]:
    """How any number of ranks would split a model's parameters, by plain name; ``layers_to_cut`` checks if they can be.

    Args:
        model: the model; parts of it may be compiled.
        words: how to split layers, by patterns of their names.
        plain: removes what torch.compile adds from the name of a layer or parameter.
    """
    found: dict[int, Tiling] = {}
    for pattern, word in words.items():
        for name, layer in model.named_modules():
            if isinstance(word, LayerCut) and isinstance(layer, KINDS[word.kind]) and fnmatchcase(plain(name), pattern):
                axes = CutLayer(name, layer, word).axes()
                found |= {id(layer._parameters.get(key)): Tiling(axis, word.parts) for key, axis in axes.items()}
    return {plain(name): found[id(one)] for name, one in model.named_parameters() if id(one) in found}


def require_able(name: str, layer: Module, parent: Module, word: LayerCut) -> None:
    """Raises UserError if a layer's type cannot be split this way."""
    closed = next((one for one in (parent, layer) if is_closed(one)), None)
    if closed is not None:
        raise UserError(
            f"tensor= of the task splits {name}, and {type(closed).__name__} of torch.nn may use its weights without "
            "calling it",
            "write the block with separate torch.nn.Linear layers",
        )
    allowed = KINDS[word.kind].__name__
    if type(layer) is not KINDS[word.kind] or layer._parameters.get("weight") is None:
        raise UserError(
            f"tensor= of the task splits {name}, {kind_of(layer)}, by {word.kind}, which takes a plain "
            f"torch.nn.{allowed}",
            f"name the {allowed} layers in it, or leave it whole",
        )
    if isinstance(layer, Embedding) and (layer.max_norm is not None or layer.scale_grad_by_freq):
        raise UserError(
            f"tensor= of the task splits {name}, an Embedding with max_norm or scale_grad_by_freq",
            "leave that option out, or the table whole",
        )


def is_closed(module: Module) -> bool:
    """Whether a module is one of torch's that contain layers but may not call them, such as MultiheadAttention."""
    is_theirs = type(module).__module__.startswith("torch.nn.modules.") and not isinstance(module, CONTAINERS)
    return is_theirs and any(True for _ in module.children())


def require_divisible(name: str, layer: Module, word: LayerCut, ranks: int) -> None:
    """Raises UserError if a layer cannot be split into equal parts."""
    assert isinstance(layer.weight, Tensor), "require_able has seen to it"
    length = layer.weight.shape[1 if word.kind == "rows" else 0]
    counted = {"columns": "outputs", "rows": "inputs", "vocabulary": "rows"}[word.kind]
    if length % (word.parts * ranks):
        parts = f" in {word.parts} parts" if word.parts > 1 else ""
        raise UserError(
            f"{name} has {length} {counted}{parts}, which {ranks} ranks cannot split equally",
            f"choose a multiple of {word.parts * ranks}, or another parallel.tensor",
        )
    if word.heads is not None and (word.heads % ranks or length // word.parts % word.heads):
        raise UserError(
            f"{name} has {length // word.parts} outputs in {word.heads} heads, which {ranks} ranks cannot "
            "divide equally",
            "choose a parallel.tensor that divides the number of heads",
        )


def require_same_cut(model: Module, layers: Sequence[CutLayer]) -> None:
    """Raises UserError if layers share a parameter but split it differently."""
    cut_of = {(id(one.layer), name): (axis, one.word.parts) for one in layers for name, axis in one.axes().items()}
    users: dict[int, tuple[str, tuple[int, int] | None]] = {}
    for name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            cut = cut_of.get((id(module), key))
            other, first = users.setdefault(id(parameter), (name, cut))
            if cut != first:
                names = f"{other or 'the model'} and {name}"
                fix = (
                    "split both along the same axis, such as vocabulary and columns(classes=True), or give each its own"
                )
                raise UserError(f"{names} share their {key}, and tensor= of the task splits it differently", fix)


def cut_model(
    model: Module,
    layers: Sequence[CutLayer],
    tp_group: TPGroup,
    data: Group,
    optimizers: Sequence[torch.optim.Optimizer],
) -> Partition:
    """Leaves this rank its part of each layer and of optimizer state, in place. Does not communicate.

    Args:
        model: whole, and equal on all ranks.
        layers: the result of ``layers_to_cut``.
        tp_group: the ranks that split layers.
        data: ranks that have the same parts.
        optimizers: optimizers of its parameters.

    Raises:
        UserError: an optimizer updates a part differently from the whole parameter.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    slices: dict[str, Slices] = {}
    cut: set[int] = set()
    for one in layers:
        for key, axis in one.axes().items():
            parameter = one.layer._parameters[key]
            assert parameter is not None, "axes names those that are there"
            if id(parameter) not in cut:
                cut.add(id(parameter))
                own = slices_of(tuple(parameter.shape), axis, one.word.parts, tp_group.group, data)
                slices[names[id(parameter)]] = own
                for optimizer in optimizers:
                    require_elementwise(optimizer, parameter, names[id(parameter)])
                for slots in [optimizer.state[parameter] for optimizer in optimizers if parameter in optimizer.state]:
                    whole = {slot: value for slot, value in slots.items() if isinstance(value, Tensor)}
                    slots.update((k, own.of(v)) for k, v in whole.items() if v.shape == parameter.shape)
                parameter.data = own.of(parameter.data)
                parameter.grad = None
    for one in layers:
        forward = {"columns": columns_forward, "rows": rows_forward, "vocabulary": vocabulary_forward}[one.word.kind]
        one.layer.forward = functools.partial(forward, one, tp_group)
    return Partition(tp_group, slices, frozenset(cut))


def slices_of(shape: tuple[int, ...], axis: int, parts: int, tensor: Group, data: Group) -> Slices:
    """This rank's part of a parameter."""
    part = shape[axis] // parts
    length = part // tensor.size
    begins = tuple(number * part + tensor.rank * length for number in range(parts))
    return Slices(shape, axis, begins, length, data.rank, data.size)


def columns_forward(one: CutLayer, tp_group: TPGroup, values: Tensor) -> Tensor | CutLogits:
    """This rank's outputs of a ``columns`` layer, or all of them if gathered, as logits always are in evaluation."""
    layer = one.layer
    assert isinstance(layer, Linear), "layers_to_cut has seen to it"
    outputs = linear(tp_group.inputs(values), layer.weight, layer.bias)
    if one.word.gathers or (one.word.classes and not layer.training):
        return gathered(outputs, tp_group)
    if one.word.classes:
        return CutLogits(outputs, tp_group, one.name)
    return tp_group.parts(outputs, layer.training, one.drops)


def rows_forward(one: CutLayer, tp_group: TPGroup, values: Tensor) -> Tensor:
    """All outputs of a ``rows`` layer, from this rank's part of the inputs."""
    layer = one.layer
    assert isinstance(layer, Linear), "layers_to_cut has seen to it"
    if values.shape[-1] != layer.weight.shape[1]:
        raise UserError(
            f"{one.name} gets {values.shape[-1]} inputs, but each rank has weights for {layer.weight.shape[1]}: the "
            "layer before it is not split to match",
            "split the layer that makes its inputs by columns, and infer the number of heads with -1 in views",
        )
    own = linear(plain(values), layer.weight)
    outputs = tp_group.outputs(own)
    return outputs if layer.bias is None else outputs + layer.bias.to(outputs.dtype)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # the number of rows differs between batches
def vocabulary_forward(one: CutLayer, tp_group: TPGroup, indices: Tensor) -> Tensor:
    """The vectors of all indices; each rank contributes each of its rows that occur, once."""
    layer = one.layer
    assert isinstance(layer, Embedding), "layers_to_cut has seen to it"
    count, group = layer.weight.shape[0], tp_group.group
    if bool(((indices < 0) | (indices >= count * group.size)).any()):
        raise IndexError(f"index out of range in {one.name}: {int(indices.min())} to {int(indices.max())}")
    different, places = indices.unique(return_inverse=True)
    counts = torch.bincount(different // count, minlength=group.size).tolist()
    own = different.split(counts)[group.rank] - group.rank * count
    found = layer.weight.index_select(0, own)
    if layer.padding_idx is not None:  # the padding row is not trained
        found = torch.where((own == layer.padding_idx - group.rank * count)[:, None], found.detach(), found)
    return spread(found, places, counts, tp_group)


def planned(context: StrategyContext) -> Strategy | None:
    """The strategy, if the run has tensor groups. Raises UserError if layers that the task names cannot be split."""
    layers = layers_to_cut(context.model, context.task.tensor, context.config.parallel.tensor)
    is_alone = context.world.tensor.size == 1  # a single process that only checks the task
    return None if is_alone else functools.partial(cut, context, layers)


def cut(context: StrategyContext, layers: Sequence[CutLayer], prepared: PreparedModel) -> PreparedModel:
    """Leaves this rank its part of each layer."""
    take_in_compiled_functions()
    world = context.world
    tp_group = context.tp_group(world.tensor, Neighbours.TENSOR)
    partition = cut_model(context.model, layers, tp_group, world.data, context.optimizers)
    return dataclasses.replace(prepared, partition=partition)
