"""``parallel.sequence``: between split layers of a block, each rank of a tensor group has some rows of the activations.

A block adds to a stream of activations. The first block of a model leaves each rank its share of the stream's rows, and
the last one gathers them, so the rest of the model sees whole activations. In a block, norms compute in rows, and
gather what split layers need; layers split by ``rows`` scatter their sums (Korthikanti et al. 2022, section 4.2.2).
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import Identity, Linear, Module
from torch.nn.functional import linear, pad

from hpctrain.backends.torch.strategies.fsdp.layers import is_container, layers_of
from hpctrain.backends.torch.strategies.split_values import plain
from hpctrain.backends.torch.strategies.strategy import PreparedModel, Strategy, StrategyContext
from hpctrain.backends.torch.strategies.tensor import CutLayer, layers_to_cut
from hpctrain.backends.torch.strategies.tp_group import TPGroup, exchanged, mapped, summed_backward
from hpctrain.errors import UserError

OF_CHANNELS = ("BatchNorm", "GroupNorm", "InstanceNorm")
"""Parts of the names of norms that do not normalise each row by itself."""
OF_SAMPLES = ("DropPath", "StochasticDepth", "Dropout1d", "Dropout2d", "Dropout3d", "FeatureAlphaDropout")
"""Parts of the names of modules that drop whole samples or channels: rows are not what they take them for."""
BLOCKS = "leave parallel.sequence out, or write blocks as x + down(up(norm(x))), with their norms before split layers"


@dataclass(frozen=True)
class RowBlock:
    """A block that adds to the stream of activations."""

    module: Module
    layers: Sequence[CutLayer]
    """Its split layers."""
    norms: Sequence[Module]
    adapters: Sequence[Module]
    """Matrices of LoRA that ranks have whole: A gets gathered rows if B is split, and B gets rows if A is."""


def planned(context: StrategyContext) -> Strategy | None:
    """The strategy for ``parallel.sequence``. Raises UserError if blocks of the model cannot compute in rows."""
    parallel, model = context.config.parallel, context.model
    if not parallel.sequence or parallel.tensor == 1:
        return None
    if parallel.pipeline > 1:
        what = "parallel.sequence is true, and parallel.pipeline divides the blocks whose activations ranks share"
        raise UserError(what, "leave parallel.sequence out, or set parallel.pipeline to 1")
    blocks = blocks_of(model, layers_to_cut(model, context.task.tensor, parallel.tensor))

    def in_rows(prepared: PreparedModel) -> PreparedModel:
        compute_in_rows(blocks, prepared.partition.tp_group)
        return prepared

    return None if context.world.tensor.size == 1 else in_rows


def blocks_of(model: Module, layers: Sequence[CutLayer]) -> list[RowBlock]:
    """The repeated modules that split layers are in. Raises UserError if one of them cannot compute in rows.

    Args:
        model: the model.
        layers: its split layers.
    """
    found: list[RowBlock] = []
    for module in layers_of(model):
        inside = {id(one) for one in module.modules()}
        own = [one for one in layers if id(one.layer) in inside]
        split = {id(one.layer) for one in own}
        adapters = [
            one
            for name, one in module.named_modules()
            if ".lora_" in name and type(one) is Linear and id(one) not in split
        ]
        if {one.word.kind for one in own} >= {"columns", "rows"}:
            found.append(RowBlock(module, own, list(filter(is_norm, module.modules())), adapters))
            require_rows(found[-1])
    if not found:
        raise UserError(
            "parallel.sequence is true, and no block of the model has layers split by columns and rows", BLOCKS
        )
    require_none_between(model, found)
    return found


def require_none_between(model: Module, blocks: Sequence[RowBlock]) -> None:
    """Raises UserError if a module that is in no block would get rows, as the model lists its modules."""
    named = list(model.named_modules())
    inside = {one for block in blocks for one in block.module.modules()}
    roots = {block.module for block in blocks}
    places = [place for place, (_, one) in enumerate(named) if one in roots]
    for name, one in named[places[0] : places[-1]]:
        computes = any(True for _ in one.parameters(recurse=False)) or not any(one.children())
        if computes and one not in inside and not is_container(one) and not isinstance(one, Identity):
            what = f"parallel.sequence is true, and {name}, between blocks with split layers, is in none of them"
            raise UserError(what, BLOCKS)


def is_norm(module: Module) -> bool:
    """Whether a module normalises each row by itself: one with buffers may take statistics over rows."""
    is_of_rows = named_norm(module) and not any(other in type(module).__name__ for other in OF_CHANNELS)
    return is_of_rows and not list(module.buffers()) and all(one.ndim == 1 for one in module.parameters())


def named_norm(module: Module) -> bool:
    """Whether a module is called a norm, and is not a block around one."""
    return "Norm" in type(module).__name__ and not any(module.children())


def counts_rows(module: Module) -> bool:
    """Whether a module may compute something else with a rank's rows than with all of them."""
    return named_norm(module) or any(other in type(module).__name__ for other in OF_SAMPLES)


def require_rows(block: RowBlock) -> None:
    """Raises UserError if a block cannot compute in rows."""
    odd = not_of_rows(block)
    if odd is not None:
        what = f"parallel.sequence is true, and {odd} of a {type(block.module).__name__} works on rows or gathers them"
        raise UserError(what, BLOCKS)


def not_of_rows(block: RowBlock) -> str | None:
    """Names a parameter whose gradients would differ between ranks, a layer of whose outputs they would have parts, or
    a module that would compute something else with rows. A norm of another width is one of heads, in split layers."""
    columns = [one.layer for one in block.layers if one.word.kind == "columns"]
    widths = {layer.in_features for layer in columns if isinstance(layer, Linear)}
    known = {id(one) for norm in block.norms for one in norm.parameters() if one.numel() in widths}
    layers = [*(one.layer for one in block.layers), *block.adapters]
    known |= {id(parameter) for layer in layers for parameter in layer.parameters()}
    for name, parameter in block.module.named_parameters():
        if id(parameter) not in known:
            return name
    for one in block.layers:
        if one.word.gathers or one.word.classes:
            return one.name
    for path, module in block.module.named_modules():
        if counts_rows(module) and module not in block.norms:
            return str(path)
    return None


@dataclass(frozen=True)
class CallRows:
    """Which rows of activations ranks have in one call of the model. Each has as many: the last ones may be zeros."""

    tp_group: TPGroup
    leading: tuple[int, ...]
    """The axes of whole activations before the last one."""

    @property
    def of_rank(self) -> tuple[int, ...]:
        """These axes for a rank's rows."""
        return (*(1 for _ in self.leading[1:]), -(-math.prod(self.leading) // self.tp_group.group.size))

    def padded(self, whole: Tensor) -> Tensor:
        """[rows of all ranks, width] of whole activations."""
        flat = whole.reshape(-1, whole.shape[-1])
        return pad(flat, (0, 0, 0, self.of_rank[-1] * self.tp_group.group.size - len(flat)))

    def own(self, whole: Tensor) -> Tensor:
        """This rank's rows."""
        rows = self.padded(whole).chunk(self.tp_group.group.size)[self.tp_group.group.rank]
        return rows.reshape(*self.of_rank, -1).clone()

    def joined(self, rows: Tensor) -> Tensor:
        """The rows of all ranks."""
        what = "gather the rows of activations"
        flat: Tensor = exchanged(rows.reshape(-1, rows.shape[-1]), self.tp_group.name, "join", what)
        return flat[: math.prod(self.leading)].view(*self.leading, -1)

    def scattered(self, addends: Tensor) -> Tensor:
        """This rank's rows of a sum over the ranks."""
        sums: Tensor = exchanged(self.padded(addends), self.tp_group.name, "scatter", "add up rows of activations")
        return sums.view(*self.of_rank, -1)


class RowStream:
    """The activations that blocks add to.

    Args:
        tp_group: the ranks.
        drops: whether the model may draw random numbers.
    """

    def __init__(self, tp_group: TPGroup, drops: bool) -> None:
        self.tp_group, self.drops = tp_group, drops
        self.rows = CallRows(tp_group, ())
        """Those of the call that is computed now, or computed again."""

    def use(self, rows: CallRows) -> None:
        """Sets the rows of the call that is computed from here on."""
        self.rows = rows

    def is_of_rank(self, values: Tensor) -> bool:
        """Whether values are a rank's rows."""
        return values.shape[:-1] == self.rows.of_rank

    def parts(self, values: Tensor, module: Module) -> Tensor:
        """Values of which each rank has others, computed by a module."""
        return self.tp_group.parts(values, module.training, self.drops)


class GatheredRows(torch.autograd.Function):
    """Gathered rows as split layers take them: each rank has addends of their gradients."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, whole: Tensor, rows: CallRows) -> Tensor:
        ctx.rows = rows
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return mapped(gradients[0], ctx.rows.scattered, ctx.rows.joined), None, None


def compute_in_rows(blocks: Sequence[RowBlock], tp_group: TPGroup) -> None:
    """Makes blocks compute in rows, in place."""
    stream = RowStream(tp_group, any(one.drops for block in blocks for one in block.layers))
    for number, block in enumerate(blocks):
        for norm in block.norms:
            norm.forward = functools.partial(norm_forward, stream, copy.copy(norm))
        for adapter in block.adapters:
            adapter.forward = functools.partial(adapter_forward, stream, adapter)
        for one in block.layers:
            forward = columns_forward if one.word.kind == "columns" else rows_forward
            one.layer.forward = functools.partial(forward, one, stream)
        ends = number == 0, number == len(blocks) - 1
        block.module.forward = functools.partial(block_forward, stream, block.module, block.module.forward, *ends)


def block_forward(
    stream: RowStream, block: Module, forward: Callable[..., Any], is_first: bool, is_last: bool, values: Tensor,
    *more: Any, **keys: Any,
) -> Any:  # fmt: skip
    """The outputs of a block; a tuple begins with the activations."""
    if is_first:
        stream.use(CallRows(stream.tp_group, tuple(values.shape[:-1])))
        values = mapped(values, stream.rows.own, stream.rows.joined)
    elif not stream.is_of_rank(values):
        raise UserError("parallel.sequence is true, and blocks of the model do not follow each other", BLOCKS)
    found = forward(stream.parts(values, block), *more, **keys)
    rows, *others = found if isinstance(found, tuple) else (found,)
    if not stream.is_of_rank(rows):
        what = (
            f"parallel.sequence is true, and a {type(block).__name__} returns whole activations, which a norm gathers"
        )
        raise UserError(what, BLOCKS)
    passed = plain(rows)  # marked again by the next block, which may be compiled
    if is_last:
        passed = mapped(passed, stream.rows.joined, functools.partial(begin_backward, stream, stream.rows))
    return (passed, *others) if isinstance(found, tuple) else passed


def begin_backward(stream: RowStream, rows: CallRows, gradients: Tensor) -> Tensor:
    """This rank's rows of the gradients of the last block's outputs. Blocks computed again from here on are of the same
    call of the model."""
    if not torch.compiler.is_compiling():  # graphs cannot do this in backward
        stream.use(rows)
    return rows.own(gradients)


def norm_forward(stream: RowStream, norm: Module, values: Tensor) -> Tensor:
    """Normalises rows, and gathers them. Ranks have addends of the gradients of weights, which are summed."""
    weights: dict[str, Tensor] = dict(norm.named_parameters())
    if not stream.is_of_rank(values):  # whole ones, or heads; require_rows saw to weights
        return functional_call(norm, {}, (values,))  # type: ignore[no-any-return]
    if weights:
        flat = summed_backward(torch.cat([one.flatten() for one in weights.values()]), stream.tp_group)
        parts = flat.split([one.numel() for one in weights.values()])
        weights = {name: part.to(one.dtype) for (name, one), part in zip(weights.items(), parts, strict=True)}
    own: Tensor = functional_call(norm, weights, (plain(values),))
    gathered = mapped(own, stream.rows.joined, stream.rows.own)
    inside: Tensor = GatheredRows.apply(own, gathered.detach(), stream.rows)  # type: ignore[no-untyped-call]
    stream.tp_group.use_inputs(gathered, inside)
    return gathered


def adapter_forward(stream: RowStream, layer: Module, values: Tensor) -> Tensor:
    """Outputs of a matrix that all ranks have. If they have different rows, the gradients of its weights are summed."""
    assert isinstance(layer, Linear), "blocks_of has seen to it"
    if not stream.is_of_rank(values):
        return linear(values, layer.weight, layer.bias)
    bias = None if layer.bias is None else summed_backward(layer.bias, stream.tp_group)
    return stream.parts(linear(plain(values), summed_backward(layer.weight, stream.tp_group), bias), layer)


def columns_forward(one: CutLayer, stream: RowStream, values: Tensor) -> Tensor:
    """This rank's outputs of a ``columns`` layer."""
    layer = one.layer
    assert isinstance(layer, Linear), "layers_to_cut has seen to it"
    if values.shape[:-1] != stream.rows.leading:
        raise UserError(f"parallel.sequence is true, and {one.name} gets rows that no norm has gathered", BLOCKS)
    outputs = linear(stream.tp_group.inputs(values), layer.weight, layer.bias)
    return stream.parts(outputs, layer)


def rows_forward(one: CutLayer, stream: RowStream, values: Tensor) -> Tensor:
    """This rank's rows of the outputs of a ``rows`` layer."""
    layer = one.layer
    assert isinstance(layer, Linear), "layers_to_cut has seen to it"
    stream.tp_group.forget_inputs()
    constant = None if layer.bias is None else layer.bias.detach()
    # The difference is zero. It gives the bias, which is added to rows, the gradient of all rows.
    addends = linear(plain(values), layer.weight, None if layer.bias is None else layer.bias - constant)
    rows = mapped(addends, stream.rows.scattered, stream.rows.joined)
    return stream.parts(rows if constant is None else rows + constant.to(rows.dtype), layer)
