"""Communication where split layers of a PyTorch model begin and end: sums over ranks, and the cross-entropy of logits
whose classes are split, which are never gathered."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, TypeAlias, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import embedding

from hpctrain.backends.torch.strategies.exchange import Exchange, HostExchange
from hpctrain.backends.torch.strategies.split_values import of_rank, plain
from hpctrain.comm.group import Group
from hpctrain.errors import UserError
from hpctrain.system.array_types import Array
from hpctrain.train.clock import NO_CLOCK, Neighbours, StepClock, Waiting

HALVES = (torch.bfloat16, torch.float16)
"""Dtypes that MPI cannot add, and in which sums would lose precision."""
Map: TypeAlias = Callable[[Tensor], Tensor]


class TPGroup:
    """The part of a model where each rank of a group has some of the values: after ``columns``, before ``rows``.

    Args:
        group: the ranks, all of which call every method in the same order.
        clock: records the time in which this rank waits for the others.
        exchange: exchanges tensors between the ranks; by default through host memory.
        neighbours: what kind of group the ranks are.
        exact: whether 16-bit values are always added in fp32.
    """

    def __init__(
        self,
        group: Group,
        clock: StepClock = NO_CLOCK,
        exchange: Exchange | None = None,
        neighbours: Neighbours = Neighbours.TENSOR,
        exact: bool = True,
    ) -> None:
        self.group, self.exact = group, exact
        self.name = f"tensor group {next(NUMBERS)}"
        GROUPS[self.name] = self
        self.waiting = Waiting(clock, neighbours)
        self.exchange: Exchange = exchange or HostExchange(group, self.waiting)
        self.entered: tuple[Tensor, int, Tensor] | None = None
        """The last whole values that entered split layers, with their version; and what the layers compute with."""

    def inputs(self, values: Tensor) -> Tensor:
        """Whole values for a split layer. Layers with the same inputs, such as queries and keys, sum gradients once."""
        values = plain(values)
        if not torch.is_grad_enabled():
            return values
        if self.entered is not None and self.entered[0] is values and self.entered[1] == values._version:
            return self.entered[2]
        inside = summed_backward(values, self)
        self.use_inputs(values, inside)
        return inside  # not read again: after FlexAttention, Dynamo does not see what the same graph has set

    def use_inputs(self, values: Tensor, inside: Tensor) -> None:
        """Sets what split layers whose inputs are these values compute with."""
        if torch.is_grad_enabled():
            self.entered = values, values._version, inside

    def forget_inputs(self) -> None:
        """Frees what the last split layers have computed with."""
        self.entered = None

    def parts(self, values: Tensor, is_training: bool, drops: bool) -> Tensor:
        """This rank's part of values, marked so that random operations on it differ between ranks.

        Args:
            values: the part.
            is_training: whether the model may draw random numbers now.
            drops: whether it is known to do so. Others get no mark, nor do compiled layers, which know no states of
                generators: what they draw is the same on all ranks.
        """
        is_marked = drops and is_training and not torch.compiler.is_compiling()
        return values.as_subclass(of_rank(self.group.rank)) if is_marked else values

    def outputs(self, values: Tensor) -> Tensor:
        """Whole values from this rank's addends, which a split layer has computed."""
        self.forget_inputs()
        return summed_forward(values, self)

    def summed(self, values: Tensor, what: str) -> Tensor:
        """A new tensor, the sum over the ranks, bitwise equal on all of them."""
        found: Tensor = exchanged(values, self.name, "sum", what)
        return found

    def gathered(self, values: Tensor, what: str) -> Tensor:
        """A new tensor, the values of all ranks concatenated along the last axis."""
        found: Tensor = exchanged(values, self.name, "gather", what)
        return found

    def joined(self, rows: Tensor, counts: Sequence[int], what: str) -> Tensor:
        """A new tensor, the rows of all ranks concatenated; ``counts`` is the number of rows of each rank."""
        padded = rows.new_zeros(max(counts), rows.shape[1])
        padded[: len(rows)] = rows.detach()
        parts = self.exchange.gather(padded, what)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def gather(self, values: Array, what: str) -> Array:
        """Gathers an array from every rank; see ``Group.gather``."""
        with self.waiting:
            return self.group.gather(values, what)


NUMBERS = itertools.count()
GROUPS: WeakValueDictionary[str, TPGroup] = WeakValueDictionary()
"""Groups by name: an operator gets no objects, and torch.compile takes numbers for variables."""


@torch.library.custom_op("hpctrain::exchanged", mutates_args=())
def exchanged(values: Tensor, name: str, way: str, what: str) -> Tensor:
    """An exchange as one operator, which torch.compile keeps in the graphs of layers.

    Args:
        values: this rank's values.
        name: of the ranks, in ``GROUPS``.
        way: sum; gather, along the last axis; join, along the first; or scatter: this rank's rows of the sum.
        what: completes "waited for the other ranks to ..." in errors.
    """
    tp_group = GROUPS[name]
    exchange = tp_group.exchange
    if way in AXES:
        return torch.cat(exchange.gather(values, what), AXES[way])
    is_wide = values.dtype in HALVES and (tp_group.exact or not exchange.adds_halves)
    add = exchange.sum if way == "sum" else exchange.scatter
    return add(values, torch.float32 if is_wide else values.dtype, what).to(values.dtype)


AXES = {"gather": -1, "join": 0}
"""Axes along which the ranks' values are concatenated."""


@exchanged.register_fake
def _(values: Tensor, name: str, way: str, what: str) -> Tensor:
    shape, ranks = list(values.shape), GROUPS[name].group.size
    if way in AXES:
        shape[AXES[way]] *= ranks
    elif way == "scatter":
        shape[0] //= ranks
    return values.new_empty(shape)


class LinearMap(torch.autograd.Function):
    """A linear map over the ranks. Its backward pass is the transpose, whose own backward pass is the map again, so a
    loss may contain gradients, such as the forces of a potential or a gradient penalty."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, ahead: Map, back: Map) -> Tensor:
        ctx.ahead, ctx.back = ahead, back
        return ahead(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return mapped(gradients[0], ctx.back, ctx.ahead), None, None


def mapped(values: Tensor, ahead: Map, back: Map) -> Tensor:
    """Returns ``ahead(values)``; ``back`` is the transpose of ``ahead``."""
    return cast(Tensor, LinearMap.apply(values, ahead, back))  # type: ignore[no-untyped-call]


def alike(values: Tensor) -> Tensor:
    """The identity, as a new view."""
    return values.view_as(values)


def spread(rows: Tensor, places: Tensor, counts: Sequence[int], tp_group: TPGroup) -> Tensor:
    """Looks up rows of a table that is split over the ranks; gradients are summed where the rows are.

    Args:
        rows: float[counts[rank], width], this rank's rows.
        places: int64[...], the same on all ranks: indices into the rows of all ranks, in rank order.
        counts: number of rows of each rank.
        tp_group: the ranks.
    """

    def at_places(own: Tensor) -> Tensor:
        return embedding(places, tp_group.joined(own, counts, "gather the rows of a split table"))

    def collected(values: Tensor) -> Tensor:
        local = places.flatten() - sum(counts[: tp_group.group.rank])
        count = counts[tp_group.group.rank]
        own = ((local >= 0) & (local < count)).nonzero().squeeze(1)
        return values.new_zeros(count, values.shape[-1]).index_add_(0, local[own], values.flatten(0, -2)[own])

    return mapped(rows, at_places, collected)


def summed_backward(values: Tensor, tp_group: TPGroup) -> Tensor:
    """Passes whole values into a split layer unchanged; in backward, sums their gradients over the ranks."""
    return mapped(values, alike, functools.partial(tp_group.summed, what="add up gradients of a split layer's inputs"))


def summed_forward(values: Tensor, tp_group: TPGroup, what: str = "add up the outputs of a split layer") -> Tensor:
    """Sums what the ranks computed; in backward, each rank gets the gradient of the sum."""
    return mapped(values, functools.partial(tp_group.summed, what=what), alike)


def gathered(values: Tensor, tp_group: TPGroup) -> Tensor:
    """Concatenates the ranks' results along the last axis; in backward, each rank gets the gradient of its part."""

    def own(everything: Tensor) -> Tensor:
        length = everything.shape[-1] // tp_group.group.size
        return everything.narrow(-1, tp_group.group.rank * length, length).clone()

    return mapped(values, functools.partial(tp_group.gathered, what="gather the outputs of a split layer"), own)


@dataclass(eq=False)
class CutLogits:
    """The output of a layer with ``columns(classes=True)`` in training: logits of this rank's classes. Accepted by
    ``cross_entropy``, but not by torch's functions, which would take a part for the whole.
    """

    values: Tensor
    """[..., classes of this rank]."""
    tp_group: TPGroup
    """The ranks, which have the other classes."""
    layer: str
    """Name of the layer that computed them, for messages."""

    @property
    def shape(self) -> torch.Size:
        """Shape with the classes of all ranks."""
        return torch.Size((*self.values.shape[:-1], self.values.shape[-1] * self.tp_group.group.size))

    def __getitem__(self, key: slice | tuple[slice, ...]) -> CutLogits:
        """Slices leading axes, as in ``outputs[:, :-1]``."""
        keys = key if isinstance(key, tuple) else (key,)
        if len(keys) >= self.values.ndim or not all(isinstance(one, slice) for one in keys):
            self.refuse("the indexing")
        return CutLogits(self.values[keys], self.tp_group, self.layer)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> NoReturn:
        """Refuses torch functions."""
        given = (*args, *(kwargs or {}).values())
        next(one for one in given if isinstance(one, CutLogits)).refuse(function.__name__)

    def __getattr__(self, name: str) -> NoReturn:
        """Refuses tensor methods."""
        if name.startswith("__"):
            raise AttributeError(name)
        self.refuse(name)

    def refuse(self, what: str) -> NoReturn:
        """Raises UserError naming the operation."""
        raise UserError(
            f"{what} got the outputs of {self.layer}, of which each rank has only some classes",
            "use hpctrain.cross_entropy for the loss, on them or on a range of their leading axes, or split the layer "
            "by columns(gathers=True)",
        )


def cross_entropy(
    outputs: Tensor | CutLogits,
    targets: Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Literal["mean", "sum"] = "mean",
) -> Tensor:
    """Cross-entropy, in nats, as ``torch.nn.functional.cross_entropy`` computes it; also for a last layer that is split
    by ``columns(classes=True)``, without gathering its logits.

    Args:
        outputs: float[..., classes], logits; of a split layer as it returned them, or sliced as ``outputs[:, :-1]``.
        targets: int64[...], classes from 0, with the shape of the outputs without their last axis.
        ignore_index: targets with this value do not count.
        label_smoothing: fraction of each target, 0 to 1, that is spread evenly over all classes.
        reduction: the mean over the targets that count, or their sum. If their number differs between samples, a loss
            should return (sum, number).

    Returns:
        A scalar, bitwise equal on all ranks that hold parts of the layer. For 16-bit outputs of a split layer it is
        float32; for those of a whole layer its dtype is torch's choice, which is float32 under ``train.precision``.

    Raises:
        UserError: outputs and targets do not fit together, or the reduction is unknown.
        IndexError: a target is not a class.
    """
    if outputs.shape[:-1] != targets.shape:
        raise UserError(
            f"cross_entropy got outputs {list(outputs.shape)} and targets {list(targets.shape)}",
            "give targets of the shape of the outputs without their last axis, that of the classes",
        )
    if reduction not in ("mean", "sum"):
        raise UserError(f"cross_entropy got the reduction {reduction!r}", "give mean or sum")
    flat = targets.flatten()
    if isinstance(outputs, CutLogits):
        return of_cut(outputs, flat, ignore_index, label_smoothing, reduction)
    return functional.cross_entropy(
        outputs.reshape(-1, outputs.shape[-1]),
        flat,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction=reduction,
    )


def of_cut(outputs: CutLogits, targets: Tensor, ignore_index: int, label_smoothing: float, reduction: str) -> Tensor:
    """Exchanges one number per target, then two, or three with label smoothing (Shoeybi et al. 2019, section 3)."""
    tp_group, classes = outputs.tp_group, outputs.shape[-1]
    logits = outputs.values.reshape(-1, outputs.values.shape[-1])
    logits = logits.float() if logits.dtype in HALVES else logits
    counts = targets != ignore_index
    if bool((counts & ((targets < 0) | (targets >= classes))).any()):
        raise IndexError(f"a target of cross_entropy is not one of {classes} classes, nor {ignore_index}")
    count = logits.shape[1]
    local = targets - tp_group.group.rank * count
    elsewhere = (local < 0) | (local >= count)
    largest = tp_group.gathered(logits.detach().amax(1, keepdim=True), "find the largest logit").amax(1, keepdim=True)
    shifted = logits - largest
    of_targets = shifted.gather(1, local.masked_fill(elsewhere, 0)[:, None])[:, 0].masked_fill(elsewhere, 0)
    parts = [shifted.exp().sum(1), of_targets, *([shifted.sum(1)] if label_smoothing else [])]
    exponentials, of_targets, *everything = summed_forward(torch.stack(parts), tp_group, "add up the parts of a loss")
    losses = exponentials.log() - (1 - label_smoothing) * of_targets
    if everything:
        losses = losses - label_smoothing / classes * everything[0]
    total: Tensor = losses.masked_fill(~counts, 0).sum()
    return total / counts.sum() if reduction == "mean" else total
