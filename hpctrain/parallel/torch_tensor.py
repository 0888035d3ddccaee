"""Layers of a PyTorch model cut over the ranks of a tensor group, in place: parameters stay plain tensors, so that any
optimizer and reducer goes on working."""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn import Embedding, EmbeddingBag, Linear, Module, ModuleDict, ModuleList, Parameter, Sequential
from torch.nn.functional import linear

from hpctrain.comm.group import Group
from hpctrain.errors import UserError
from hpctrain.parallel.tensor_words import LayerCut
from hpctrain.parallel.torch_classes import CutLogits
from hpctrain.parallel.torch_exchange import Exchange
from hpctrain.parallel.torch_probe import require_elementwise
from hpctrain.parallel.torch_region import Region, gathered, spread, summed_backward, summed_forward
from hpctrain.train.clock import NO_CLOCK, StepClock
from hpctrain.train.state import Cut, Tiling

Kinds: TypeAlias = Mapping[str, tuple[type[Module], ...]]
KINDS: Kinds = {"columns": (Linear,), "rows": (Linear,), "vocabulary": (Embedding,)}
"""Layers that can be cut so."""
Named: TypeAlias = Sequence[tuple[str, Tensor]]
SAME_LOSS = 1e-6
"""How far losses of ranks that share out a model may differ, relative to one; where nothing is wrong, in no bit."""
CUT = (
    "With parallel.tensor a rank has some outputs of each layer with columns: infer how many heads there are with -1 "
    "in views, and let rows, gathers=True or classes=True follow"
)
"""What models are wrong about that do not go on with a part."""
ALIKE = "cut both along the same axis, such as vocabulary and columns(classes=True), or give each its own"
"""What to do with layers that share a parameter."""
CONTAINERS = (ModuleList, ModuleDict, Sequential)
"""Modules of torch.nn that only call their layers; others may look into them."""


@dataclass(frozen=True)
class Slices:
    """Where the values that a rank has of a parameter lie in the whole one: equal parts of it, along one axis, and of
    what these make up some rows or all."""

    whole: tuple[int, ...]
    """Shape of the whole parameter."""
    axis: int
    begins: tuple[int, ...]
    """Index along the axis, in the whole parameter, of the first value of each part."""
    length: int
    """Of each part along the axis."""
    copy: int
    """Which of the ranks that have the same values this is."""
    copies: int
    """How many there are."""
    rows: slice | None = None
    """Along the first axis of what the parts make up: those whose state this rank keeps; None: it keeps that of all."""

    @property
    def is_cut(self) -> bool:
        """Whether the parts are not all of the parameter."""
        return bool(self.whole) and len(self.begins) * self.length < self.whole[self.axis]

    @property
    def starts(self) -> bool:
        """Whether the first value of the whole parameter is here."""
        return self.begins[0] == 0 and (self.rows is None or self.rows.start == 0)

    def of(self, whole: Tensor) -> Tensor:
        """A copy of what the parts have of a whole tensor."""
        return torch.cat([whole.narrow(self.axis, begin, self.length) for begin in self.begins], self.axis)

    def views(self, held: Tensor) -> Iterator[tuple[Tensor, Cut]]:
        """Each part of what this rank has, and where it lies in the whole tensor."""
        if not self.whole:  # a number
            yield held, Cut((), (), self.copy, self.copies)
            return
        top = self.rows.start if self.rows is not None else 0
        for number, begin in enumerate(self.begins):
            low, high = number * self.length, (number + 1) * self.length
            first = [0] * len(self.whole)
            first[0] = top
            if self.axis == 0 and self.rows is not None:
                low, high = max(low, top), min(high, self.rows.stop)
            first[self.axis] = begin + low - number * self.length
            if low < high:
                view = held.narrow(self.axis, low - (top if self.axis == 0 else 0), high - low)
                yield view, Cut(self.whole, tuple(first), self.copy, self.copies)


@dataclass(frozen=True)
class CutLayer:
    """A layer and how it is to be cut."""

    name: str
    layer: Module
    word: LayerCut

    def axes(self) -> dict[str, int]:
        """The axis along which each parameter is cut; the others are whole on all ranks."""
        if self.word.kind == "columns":
            return {"weight": 0, "bias": 0} if self.layer.bias is not None else {"weight": 0}
        return {"weight": 1 if self.word.kind == "rows" else 0}


class TensorParallel:
    """A model whose layers may be cut, as the ranks of one tensor group have it.

    Args:
        region: of the group.
        slices: what this rank has of each parameter that is cut, by name.
        cut: ids of these parameters.
        updaters: ranks among which rows of what this one has are shared out, to be updated; one if they are not.
    """

    passes_meet = False
    """Whether ranks that see different samples exchange something in each pass, and so make equally many."""

    def __init__(
        self, region: Region, slices: Mapping[str, Slices], cut: frozenset[int], updaters: Group | None = None
    ) -> None:
        self.region = region
        self.group = region.group
        self.slices = slices
        self.cut = cut
        self.updaters = updaters or Group("data")
        self.held: Mapping[str, Parameter] = {}
        """Plain tensors in place of parameters that the model has as something else, by name."""
        self.places = slices
        """Where what this rank has of parameters lies in whole ones, by name."""

    @property
    def hint(self) -> str:
        """What those who write a model have to know of its parts, a sentence for messages; empty if it is whole."""
        return CUT if self.slices and not self.passes_meet else ""

    @property
    def complete(self) -> frozenset[int]:
        """Ids of parameters whose gradients are those of all ranks' samples as soon as a backward pass ends."""
        return frozenset()

    def parameters(self, model: Module) -> list[tuple[str, Parameter]]:
        """What this rank has, as plain tensors."""
        return [(name, self.held.get(name, one)) for name, one in model.named_parameters()]

    def swap(self, parameters: Sequence[Tensor], others: Sequence[Tensor]) -> None:
        """Gives each parameter the values of another tensor, and that the parameter's."""
        for parameter, other in zip(parameters, others, strict=True):
            parameter.data, other.data = other.data, parameter.data

    def norm(self, summed: Named) -> float:
        """L2 norm of all gradients, in which each element counts once; equal on all ranks. Collective.

        Args:
            summed: what has the gradients that this rank's optimizer gets, by names of parameters.
        """
        have = [(name, values_of(one.grad)) for name, one in summed if one.grad is not None]
        own = square_of([gradient for name, gradient in have if name in self.slices])
        shared = square_of([gradient for name, gradient in have if name not in self.slices])
        total = shared + float(self.region.gather(np.array([own]), "add up the squares of the gradients").sum())
        if self.updaters.size > 1:
            total = float(self.updaters.gather(np.array([total]), "add up the squares of all rows").sum())
        return math.sqrt(total)

    def rows(self, name: str, shape: tuple[int, ...], begin: int, end: int) -> Slices:
        """Rows of what this rank has of a parameter, which it alone of ``updaters`` updates.

        Args:
            name: of the parameter.
            shape: of what this rank has of it.
            begin, end: of the rows, the last one left out; a number has one.
        """
        known = self.slices.get(name)
        if known is not None:
            return replace(known, copy=0, copies=1, rows=slice(begin, end))
        length = shape[0] if shape else 1
        return Slices(shape, 0, (0,), length, self.group.rank, self.group.size, slice(begin, end))

    def leave(self) -> None:
        """A forward pass is over: random numbers are equal again."""
        self.region.leave()

    def passing(self) -> AbstractContextManager[None]:
        """The body is the task's own code, which computes with the model."""
        return nullcontext()

    def finish(self, device: torch.device) -> None:
        """A backward pass is over."""

    def shared(self, model: Module) -> list[tuple[str, Parameter]]:
        """Parameters that all ranks of the group have alike."""
        return [(name, one) for name, one in self.parameters(model) if id(one) not in self.cut]

    def require_same_loss(self, loss: tuple[float, float], update: int) -> None:
        """Raises UserError, on all ranks of the group, if they have not trained on the same. Collective.

        Args:
            loss: (sum, weight) over this rank's samples.
            update: its number, for people.
        """
        if not self.slices:
            return
        found = self.region.gather(np.array(loss), "compare their losses")
        if not np.allclose(found, found[0], rtol=SAME_LOSS, atol=0, equal_nan=True):
            told = " and ".join(f"{total:g} (of {weight:g})" for total, weight in found.tolist())
            raise UserError(
                f"in update {update} the losses of ranks that share out the model differ: {told}. They saw different "
                "samples, or values of which each rank has a part reached the loss",
                "cut the last layer by columns(gathers=True) or (hpctrain.cross_entropy) columns(classes=True), or let "
                "rows follow; and let nothing but the sample and its rng decide what a transform or a stream gives",
            )

    def require_whole_gradients(self, summed: Named, everyone: Group) -> None:
        """Raises UserError, on all ranks, if the gradient of what a tensor group has alike differs in it. Collective.

        Args:
            summed: see ``norm``; ranks of a tensor group have the same.
            everyone: all tensor groups.
        """
        if not self.slices:
            return
        sums = {
            name: zlib.crc32(one.grad.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
            for name, one in summed
            if name not in self.slices
            if one.grad is not None and one.device.type == "cpu"  # kernels of GPUs may add in any order
        }
        of_ranks = everyone.allgather(sums, "compare what cut layers leave whole")
        for rank, found in enumerate(of_ranks):
            first = of_ranks[rank - rank % self.group.size]
            odd = next((name for name in first if found.get(name) != first[name]), None)
            if odd is not None:
                raise UserError(
                    f"the gradient of {odd} differs between ranks that share out the model: it works on values of "
                    "which each rank has a part, and is not cut itself",
                    "cut its layer, too, or use it before a layer with columns or behind one with rows",
                )


def values_of(gradient: Tensor) -> Tensor:
    """All that is not zero in it, each element once."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def square_of(gradients: Sequence[Tensor]) -> float:
    """Sum of the squares of all elements."""
    norms = torch._foreach_norm(list(gradients)) if gradients else []
    return float(torch.stack([norm.double().cpu() for norm in norms]).square().sum()) if norms else 0.0


def uncut(group: Group | None = None) -> TensorParallel:
    """A model that each rank has whole."""
    return TensorParallel(Region(group or Group("tensor")), {}, frozenset())


def planned(model: Module, words: Mapping[str, Any], ranks: int) -> list[CutLayer]:
    """Which layers are to be cut, and how; changes nothing.

    Args:
        model: any.
        words: by patterns of layers' names, such as ``blocks.*.up``.
        ranks: of a tensor group; 1 cuts nothing.

    Raises:
        UserError: a pattern names no layer, or one that cannot be cut so; names it.
    """
    if ranks == 1:
        return []
    layers = named_layers(model, words)
    for one in layers:
        require_divisible(one.name, one.layer, one.word, ranks)
    require_same_cut(model, layers)
    return layers


def named_layers(model: Module, words: Mapping[str, Any], kinds: Kinds = KINDS) -> list[CutLayer]:
    """Which layers a task names, and how they are to be cut.

    Args:
        model: any.
        words: by patterns of layers' names.
        kinds: that can be cut.

    Raises:
        UserError: a pattern names no layer, or one that cannot be cut so; names it.
    """
    layers: dict[str, CutLayer] = {}
    parents = {
        f"{name}.{child}".lstrip("."): one for name, one in model.named_modules() for child, _ in one.named_children()
    }
    for pattern, word in words.items():
        if not isinstance(word, LayerCut):
            what = f"tensor[{pattern!r}] of the task is a {type(word).__name__}"
            raise UserError(what, "write hpctrain.columns, hpctrain.rows or hpctrain.vocabulary")
        found = [(name, layer) for name, layer in model.named_modules() if name and fnmatchcase(name, pattern)]
        if not found:
            able = [
                name for name, layer in model.named_modules() if any(type(layer) in each for each in kinds.values())
            ]
            raise UserError(
                f"tensor= of the task: no layer of the model is called {pattern}",
                f"its layers that can be cut are: {', '.join(able[:20]) or 'none'}{' ...' if len(able) > 20 else ''}",
            )
        for name, layer in found:
            if name in layers and layers[name].word != word:
                raise UserError(f"tensor= of the task names {name} twice, and cuts it differently", "name it once")
            require_able(name, layer, parents[name], word, kinds)
            layers[name] = CutLayer(name, layer, word)
    return list(layers.values())


def tilings(model: Module, words: Mapping[str, Any], plain: Callable[[str], str]) -> dict[str, Tiling]:
    """How any number of ranks would cut the parameters of a model, by plain name; see ``planned``, which refuses.

    Args:
        model: parts of it may be compiled.
        words: by patterns of layers' names.
        plain: of the name of a layer or parameter, that of one that is not compiled.
    """
    found: dict[int, Tiling] = {}
    for pattern, word in words.items():
        for name, layer in model.named_modules():
            if isinstance(word, LayerCut) and isinstance(layer, KINDS[word.kind]) and fnmatchcase(plain(name), pattern):
                axes = CutLayer(name, layer, word).axes()
                found |= {id(layer._parameters.get(key)): Tiling(axis, word.parts) for key, axis in axes.items()}
    return {plain(name): found[id(one)] for name, one in model.named_parameters() if id(one) in found}


def require_able(name: str, layer: Module, parent: Module, word: LayerCut, kinds: Kinds) -> None:
    """Raises UserError if a layer is of a kind that cannot be cut so."""
    closed = next((one for one in (parent, layer) if is_closed(one)), None)
    if closed is not None:
        raise UserError(
            f"tensor= of the task cuts {name}, and {type(closed).__name__} of torch.nn may use its weights without "
            "calling it",
            "write the block with torch.nn.Linear layers of its own",
        )
    weight, told = layer._parameters.get("weight"), " or ".join(kind.__name__ for kind in kinds[word.kind])
    if type(layer) not in kinds[word.kind] or weight is None:
        raise UserError(
            f"tensor= of the task cuts {name}, a {type(layer).__name__}, by {word.kind}, which takes a plain "
            f"torch.nn.{told}",
            f"name the {told} layers in it, or leave it whole",
        )
    if isinstance(layer, Embedding | EmbeddingBag) and (layer.max_norm is not None or layer.scale_grad_by_freq):
        raise UserError(
            f"tensor= of the task cuts {name}, an {type(layer).__name__} with max_norm or scale_grad_by_freq",
            "leave that option out, or the table whole",
        )


def is_closed(module: Module) -> bool:
    """Whether it is one of torch's that has layers, such as MultiheadAttention, and may not call them."""
    is_theirs = type(module).__module__.startswith("torch.nn.modules.") and not isinstance(module, CONTAINERS)
    return is_theirs and any(True for _ in module.children())


def require_divisible(name: str, layer: Module, word: LayerCut, ranks: int) -> None:
    """Raises UserError if the ranks cannot have equal parts of a layer."""
    assert isinstance(layer.weight, Tensor), "require_able has seen to it"
    length = layer.weight.shape[1 if word.kind == "rows" else 0]
    counted = {"columns": "outputs", "rows": "inputs", "vocabulary": "rows"}[word.kind]
    if length % (word.parts * ranks):
        parts = f" in {word.parts} parts" if word.parts > 1 else ""
        raise UserError(
            f"{name} has {length} {counted}{parts}, of which {ranks} ranks cannot have equal shares",
            f"choose a multiple of {word.parts * ranks}, or another parallel.tensor",
        )
    if word.heads is not None and (word.heads % ranks or length // word.parts % word.heads):
        raise UserError(
            f"{name} has {length // word.parts} outputs in {word.heads} heads, of which {ranks} ranks cannot have "
            "whole ones in equal number",
            "choose a parallel.tensor that divides the number of heads",
        )


def require_same_cut(model: Module, layers: Sequence[CutLayer], fix: str = ALIKE) -> None:
    """Raises UserError if layers share a parameter and do not cut it alike, with what can be done about it."""
    cut_of = {(id(one.layer), name): (axis, one.word.parts) for one in layers for name, axis in one.axes().items()}
    users: dict[int, tuple[str, tuple[int, int] | None]] = {}
    for name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            cut = cut_of.get((id(module), key))
            other, first = users.setdefault(id(parameter), (name, cut))
            if cut != first:
                raise UserError(
                    f"{other or 'the model'} and {name} share their {key}, and tensor= of the task cuts it differently",
                    fix,
                )


def cut_model(
    model: Module,
    layers: Sequence[CutLayer],
    tensor: Group,
    data: Group,
    optimizers: Sequence[torch.optim.Optimizer],
    clock: StepClock = NO_CLOCK,
    updaters: Group | None = None,
    exchange: Exchange | None = None,
) -> TensorParallel:
    """Leaves of each layer what this rank is to have, in place, with its optimizer's state. Talks to no other rank.

    Args:
        model: whole, and equal on all ranks.
        layers: of ``planned``.
        tensor: ranks that share it out.
        data: ranks that have the same parts.
        optimizers: of its parameters.
        clock: told of waits for the other ranks of ``tensor``.
        updaters: see TensorParallel.
        exchange: see Region.

    Raises:
        UserError: an optimizer looks at more than what a rank has.
    """
    region = Region(tensor, clock, exchange)
    own = functools.partial(slices_of, tensor=tensor, data=data)
    slices, cut = keep_own(model, layers, optimizers, own)
    for one in layers:
        forward = {"columns": columns_forward, "rows": rows_forward, "vocabulary": vocabulary_forward}[one.word.kind]
        one.layer.forward = functools.partial(forward, one, region)
    return TensorParallel(region, slices, cut, updaters)


def keep_own(
    model: Module,
    layers: Sequence[CutLayer],
    optimizers: Sequence[torch.optim.Optimizer],
    slices_for: Callable[[tuple[int, ...], int, int], Slices],
) -> tuple[dict[str, Slices], frozenset[int]]:
    """Leaves of each parameter what this rank is to have, in place, with its optimizer's state.

    Args:
        model: whole.
        layers: that are cut.
        optimizers: of its parameters.
        slices_for: what that is, of a parameter's shape, axis and parts.

    Returns:
        It by names of parameters, and their ids.

    Raises:
        UserError: an optimizer looks at more than what a rank has.
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
                own = slices_for(tuple(parameter.shape), axis, one.word.parts)
                slices[names[id(parameter)]] = own
                for optimizer in optimizers:
                    require_elementwise(optimizer, parameter, names[id(parameter)], axis)
                for slots in [optimizer.state[parameter] for optimizer in optimizers if parameter in optimizer.state]:
                    whole = {slot: value for slot, value in slots.items() if isinstance(value, Tensor)}
                    slots.update((k, own.of(v)) for k, v in whole.items() if v.shape == parameter.shape)
                parameter.data = own.of(parameter.data)
                parameter.grad = None
    return slices, frozenset(cut)


def slices_of(shape: tuple[int, ...], axis: int, parts: int, tensor: Group, data: Group) -> Slices:
    """What a rank has of a parameter."""
    part = shape[axis] // parts
    length = part // tensor.size
    begins = tuple(number * part + tensor.rank * length for number in range(parts))
    return Slices(shape, axis, begins, length, data.rank, data.size)


def columns_forward(one: CutLayer, region: Region, values: Tensor) -> Tensor | CutLogits:
    """Some of the outputs, or all if they are gathered; those for a metric always are."""
    region.leave(always=False)
    layer = one.layer
    assert isinstance(layer, Linear), "planned has seen to it"
    outputs = linear(summed_backward(values, region), layer.weight, layer.bias)
    if one.word.gathers or (one.word.classes and not layer.training):
        return gathered(outputs, region)
    if one.word.classes:
        return CutLogits(outputs, region, one.name)
    if layer.training:
        region.enter(outputs.device)
    return outputs


def rows_forward(one: CutLayer, region: Region, values: Tensor) -> Tensor:
    """All outputs, of some of the inputs."""
    region.leave(always=False)
    layer = one.layer
    assert isinstance(layer, Linear), "planned has seen to it"
    if values.shape[-1] != layer.weight.shape[1]:
        raise UserError(
            f"{one.name} gets {values.shape[-1]} inputs, and each rank has {layer.weight.shape[1]} of them: what comes "
            "before it is not cut as it is",
            "cut the layer that makes its inputs by columns, and infer the number of heads with -1 in views",
        )
    own = linear(values, layer.weight)
    outputs = summed_forward(own, region)
    return outputs if layer.bias is None else outputs + layer.bias.to(outputs.dtype)


def vocabulary_forward(one: CutLayer, region: Region, indices: Tensor) -> Tensor:
    """The vectors of all indices: each rank gives those that it has, each once, however often it occurs."""
    region.leave(always=False)
    layer = one.layer
    assert isinstance(layer, Embedding), "planned has seen to it"
    count, group = layer.weight.shape[0], region.group
    if bool(((indices < 0) | (indices >= count * group.size)).any()):
        raise IndexError(f"index out of range in {one.name}: {int(indices.min())} to {int(indices.max())}")
    different, places = indices.unique(return_inverse=True)
    counts = torch.bincount(different // count, minlength=group.size).tolist()
    own = different.split(counts)[group.rank] - group.rank * count
    found = layer.weight.index_select(0, own)
    if layer.padding_idx is not None:  # which is not trained
        found = torch.where((own == layer.padding_idx - group.rank * count)[:, None], found.detach(), found)
    return spread(found, places, counts, region)
