"""What happens where cut layers of a PyTorch model begin and end: sums over the ranks, other random numbers, and
the cross-entropy of logits whose classes are cut: no rank ever has those of all."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NoReturn, TypeAlias, cast

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import embedding

from hpctrain.backends.torch.strategies.exchange import Exchange, HostExchange
from hpctrain.comm.group import Group
from hpctrain.errors import UserError
from hpctrain.train.clock import NO_CLOCK, Neighbours, StepClock, Waiting
from hpctrain.train.seeds import derive

HALVES = (torch.bfloat16, torch.float16)
"""Types that MPI cannot add, and in which sums would lose what single ranks have."""
Map: TypeAlias = Callable[[Tensor], Tensor]
Outside: TypeAlias = list[tuple[torch.Generator, Tensor, int]]
"""Generators of random numbers, where each stood when a region was entered, and with what seed it continued; none
outside regions."""


class Region:
    """The part of a model in which each rank of a group has some of the values: behind ``columns``, before ``rows``.

    Dropout differs between the ranks there, and is equal outside. The streams inside are made of the one outside at
    each entry: they have no state that would have to be saved.

    Args:
        group: the ranks, all of which call every method in the same order.
        clock: records the time in which this rank waits for the others.
        exchange: of tensors among the ranks; by default through memory of the host.
        neighbours: what the ranks are to each other.
    """

    def __init__(
        self,
        group: Group,
        clock: StepClock = NO_CLOCK,
        exchange: Exchange | None = None,
        neighbours: Neighbours = Neighbours.TENSOR,
    ) -> None:
        self.group = group
        self.waiting = Waiting(clock, neighbours)
        self.exchange: Exchange = exchange or HostExchange(group, self.waiting)
        self.outside: Outside = []
        """While random numbers are those of the inside."""

    def enter(self, device: torch.device) -> None:
        """From here on each rank draws other random numbers."""
        if self.outside:
            return
        number = int(torch.randint(2**62, ()))
        generators = [torch.default_generator]
        if device.type == "cuda":
            generators.append(torch.cuda.default_generators[device.index or 0])
        seed = derive(number, self.group.rank)
        self.outside = [(generator, generator.get_state(), seed) for generator in generators]
        for generator in generators:
            generator.manual_seed(seed)

    def leave(self, always: bool = True) -> None:
        """From here on all draw the same again.

        Args:
            always: False inside a model: if a checkpoint of torch has computed again what ends in the region, it has
                put random states back itself, and others have come since.
        """
        for generator, state, seed in self.outside:
            if always or generator.initial_seed() == seed:
                generator.set_state(state)
        self.outside = []

    @contextmanager
    def again(self, outside: Outside) -> Iterator[None]:
        """Computes again what was computed when ``self.outside`` was this. What it is now stays."""
        now, self.outside = self.outside, list(outside)
        try:
            yield
        finally:
            self.outside = now

    def summed(self, values: Tensor, what: str) -> Tensor:
        """A new tensor, the sum over the ranks, with the same bits on all of them."""
        wide = torch.float32 if values.dtype in HALVES else values.dtype
        return self.exchange.sum(values, wide, what).to(values.dtype)

    def gathered(self, values: Tensor, what: str) -> Tensor:
        """A new tensor, those of all ranks side by side along the last axis."""
        return torch.cat(self.exchange.gather(values, what), -1)

    def joined(self, rows: Tensor, counts: Sequence[int], what: str) -> Tensor:
        """A new tensor, the rows of all ranks one below the other, each of which has that number."""
        padded = rows.new_zeros(max(counts), rows.shape[1])
        padded[: len(rows)] = rows.detach()
        parts = self.exchange.gather(padded, what)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def gather(self, values: NDArray[Any], what: str) -> NDArray[Any]:
        """The arrays of all ranks, see ``Group.gather``."""
        with self.waiting:
            return self.group.gather(values, what)


class LinearMap(torch.autograd.Function):
    """A linear map over the ranks. The backward pass is its transpose, whose own backward pass is the map again: a loss
    may hold gradients, such as the forces of a potential or a penalty."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, ahead: Map, back: Map) -> Tensor:
        ctx.ahead, ctx.back = ahead, back
        return ahead(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return mapped(gradients[0], ctx.back, ctx.ahead), None, None


def mapped(values: Tensor, ahead: Map, back: Map) -> Tensor:
    """``ahead(values)``, of which ``back`` is the transpose."""
    return cast(Tensor, LinearMap.apply(values, ahead, back))  # type: ignore[no-untyped-call]


def alike(values: Tensor) -> Tensor:
    """The same."""
    return values.view_as(values)


def spread(rows: Tensor, places: Tensor, counts: Sequence[int], region: Region) -> Tensor:
    """Rows of a table that is partitioned over the ranks, at each place; gradients are added up where the rows are.

    Args:
        rows: float[counts[rank], width], this rank's.
        places: int64[...], the same on all ranks: indices of rows, those of the first rank first.
        counts: how many rows each rank has.
        region: of the ranks.
    """

    def at_places(own: Tensor) -> Tensor:
        return embedding(places, region.joined(own, counts, "gather the rows of a cut table"))

    def collected(values: Tensor) -> Tensor:
        local, count = places.flatten() - sum(counts[: region.group.rank]), counts[region.group.rank]
        own = ((local >= 0) & (local < count)).nonzero().squeeze(1)
        return values.new_zeros(count, values.shape[-1]).index_add_(0, local[own], values.flatten(0, -2)[own])

    return mapped(rows, at_places, collected)


def summed_backward(values: Tensor, region: Region) -> Tensor:
    """Whole values on their way into a layer that is cut: as they are, and the ranks' gradients are added up."""
    return mapped(values, alike, functools.partial(region.summed, what="add up the gradients of a cut layer's inputs"))


def summed_forward(values: Tensor, region: Region, what: str = "add up the outputs of a cut layer") -> Tensor:
    """The sum of what the ranks computed; the gradient is that of each."""
    return mapped(values, functools.partial(region.summed, what=what), alike)


def gathered(values: Tensor, region: Region) -> Tensor:
    """What the ranks computed, side by side; each rank has the gradient of its part."""

    def own(everything: Tensor) -> Tensor:
        length = everything.shape[-1] // region.group.size
        return everything.narrow(-1, region.group.rank * length, length).clone()

    return mapped(values, functools.partial(region.gathered, what="gather the outputs of a cut layer"), own)


class CutLogits:
    """What a layer with ``columns(classes=True)`` gives in training: this rank's classes. ``cross_entropy`` takes it;
    torch's functions do not, which would take a part for the whole.

    Args:
        values: [..., classes of this rank].
        region: of the ranks that have the others.
        layer: that computed them, for people.
    """

    def __init__(self, values: Tensor, region: Region, layer: str) -> None:
        self.values = values
        self.region = region
        self.layer = layer

    @property
    def shape(self) -> torch.Size:
        """With the classes of all ranks."""
        return torch.Size((*self.values.shape[:-1], self.values.shape[-1] * self.region.group.size))

    def __getitem__(self, key: slice | tuple[slice, ...]) -> CutLogits:
        """A range of each leading axis, such as ``outputs[:, :-1]``."""
        keys = key if isinstance(key, tuple) else (key,)
        if len(keys) >= self.values.ndim or not all(isinstance(one, slice) for one in keys):
            self.refuse("the indexing")
        return CutLogits(self.values[keys], self.region, self.layer)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> NoReturn:
        """Functions of torch come here."""
        given = (*args, *(kwargs or {}).values())
        next(one for one in given if isinstance(one, CutLogits)).refuse(function.__name__)

    def __getattr__(self, name: str) -> NoReturn:
        """Methods of tensors come here."""
        if name.startswith("__"):
            raise AttributeError(name)
        self.refuse(name)

    def refuse(self, what: str) -> NoReturn:
        """Raises UserError."""
        raise UserError(
            f"{what} got the outputs of {self.layer}, of which each rank has some classes",
            "use hpctrain.cross_entropy for the loss, on them or on a range of their leading axes, or cut the layer by "
            "columns(gathers=True)",
        )


def cross_entropy(
    outputs: Tensor | CutLogits,
    targets: Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Literal["mean", "sum"] = "mean",
) -> Tensor:
    """Cross-entropy, in nats, as ``torch.nn.functional.cross_entropy`` computes it; also of a last layer that is cut by
    ``columns(classes=True)``, without gathering what the ranks have.

    Args:
        outputs: float[..., classes], logits; of a cut layer as it gave them, or ``outputs[:, :-1]`` and the like.
        targets: int64[...], classes from 0 on, of the shape of the outputs without their last axis.
        ignore_index: targets of this value do not count.
        label_smoothing: share of each target, 0 to 1, that is spread evenly over all classes.
        reduction: the mean over the targets that count, or their sum. Where their number differs from sample to sample,
            a loss returns (sum, number).

    Returns:
        A scalar, bitwise equal on all ranks that hold parts of the layer. Of 16-bit outputs that of a cut layer is
        float32; that of whole ones is what torch makes of them, which is float32 under ``train.precision``.

    Raises:
        UserError: outputs and targets do not fit together, or the reduction is another one.
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
    """Two sums over the ranks, of a number or two a target: Shoeybi et al. 2019, section 3."""
    region, classes = outputs.region, outputs.shape[-1]
    logits = outputs.values.reshape(-1, outputs.values.shape[-1])
    logits = logits.float() if logits.dtype in HALVES else logits
    counts = targets != ignore_index
    if bool((counts & ((targets < 0) | (targets >= classes))).any()):
        raise IndexError(f"a target of cross_entropy is none of {classes} classes, nor {ignore_index}")
    count = logits.shape[1]
    local = targets - region.group.rank * count
    elsewhere = (local < 0) | (local >= count)
    largest = region.gathered(logits.detach().amax(1, keepdim=True), "find the largest logit").amax(1, keepdim=True)
    shifted = logits - largest
    of_targets = shifted.gather(1, local.masked_fill(elsewhere, 0)[:, None])[:, 0].masked_fill(elsewhere, 0)
    parts = [shifted.exp().sum(1), of_targets, *([shifted.sum(1)] if label_smoothing else [])]
    exponentials, of_targets, *everything = summed_forward(torch.stack(parts), region, "add up the parts of a loss")
    losses = exponentials.log() - (1 - label_smoothing) * of_targets
    if everything:
        losses = losses - label_smoothing / classes * everything[0]
    total: Tensor = losses.masked_fill(~counts, 0).sum()
    return total / counts.sum() if reduction == "mean" else total
