"""What happens where cut layers of a PyTorch model begin and end: sums over the ranks, other random numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias, cast

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import embedding

from hpctrain.comm.group import Group
from hpctrain.parallel.torch_exchange import Exchange, HostExchange, Waiting
from hpctrain.train.clock import NO_CLOCK, Neighbours, StepClock
from hpctrain.train.seeds import derive

HALVES = (torch.bfloat16, torch.float16)
"""Types that MPI cannot add, and in which sums would lose what single ranks have."""
Outside: TypeAlias = list[tuple[torch.Generator, Tensor, int]]
"""Generators of random numbers, where each stood when a region was entered, and with what seed it went on; none outside
of regions."""


class Region:
    """The part of a model in which each rank of a group has some of the values: behind ``columns``, before ``rows``.

    Dropout differs between the ranks there, and is equal outside. The streams inside are made of the one outside at
    each entry: they have no state that would have to be saved.

    Args:
        group: the ranks, all of which call every method in the same order.
        clock: told of the time in which this rank waits for the others.
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
            always: False inside of a model: if a checkpoint of torch has computed again what ends in the region, it has
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
        """A new tensor, the rows of all ranks one below the other, of which each has so many."""
        padded = rows.new_zeros(max(counts), rows.shape[1])
        padded[: len(rows)] = rows.detach()
        parts = self.exchange.gather(padded, what)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def gather(self, values: NDArray[Any], what: str) -> NDArray[Any]:
        """The arrays of all ranks, see ``Group.gather``."""
        with self.waiting:
            return self.group.gather(values, what)


# Backward passes are made of the functions themselves, so that they can be differentiated again: a loss may hold
# gradients, such as the forces of a potential or a penalty.


class SummedBackward(torch.autograd.Function):
    """Whole values go into a layer that is cut: as they are, and the ranks' gradients are added up."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, region: Region, what: str) -> Tensor:
        ctx.region, ctx.what = region, what
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return summed_forward(gradients[0], ctx.region, ctx.what), None, None


class SummedForward(torch.autograd.Function):
    """The ranks' outputs are added up, and the gradient is that of each."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, region: Region, what: str) -> Tensor:
        ctx.region, ctx.what = region, what
        return region.summed(values, what)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return summed_backward(gradients[0], ctx.region, ctx.what), None, None


class Gathered(torch.autograd.Function):
    """The ranks' outputs stand side by side, and each rank has the gradient of its own."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, region: Region) -> Tensor:
        ctx.region = region
        return region.gathered(values, "gather the outputs of a cut layer")

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return cast(Tensor, Own.apply(gradients[0], ctx.region)), None  # type: ignore[no-untyped-call]


class Own(torch.autograd.Function):
    """What is a rank's of values that stand side by side, and the gradients of all ranks stand so."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, region: Region) -> Tensor:
        ctx.region, length = region, values.shape[-1] // region.group.size
        return values.narrow(-1, region.group.rank * length, length).clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gathered(gradients[0], ctx.region), None


class Spread(torch.autograd.Function):
    """Each rank has some rows of a table, and all get the rows of all places; each adds up what is its rows'."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Tensor, counts: Sequence[int], region: Region) -> Tensor:
        ctx.save_for_backward(places)
        ctx.counts, ctx.region = counts, region
        return embedding(places, region.joined(rows, counts, "gather the rows of a cut table"))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (places,) = ctx.saved_tensors
        own = Collected.apply(gradients[0], places, ctx.counts, ctx.region)  # type: ignore[no-untyped-call]
        return own, None, None, None


class Collected(torch.autograd.Function):
    """All ranks have the values of all places, and each adds up those of its rows."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, places: Tensor, counts: Sequence[int], region: Region) -> Tensor:
        ctx.save_for_backward(places)
        ctx.counts, ctx.region = counts, region
        local = places.flatten() - sum(counts[: region.group.rank])
        count = counts[region.group.rank]
        own = ((local >= 0) & (local < count)).nonzero().squeeze(1)
        return values.new_zeros(count, values.shape[-1]).index_add_(0, local[own], values.flatten(0, -2)[own])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (places,) = ctx.saved_tensors
        return spread(gradients[0], places, ctx.counts, ctx.region), None, None, None


def spread(rows: Tensor, places: Tensor, counts: Sequence[int], region: Region) -> Tensor:
    """Rows of a table that the ranks share out, at each place.

    Args:
        rows: float[counts[rank], width], this rank's.
        places: int64[...], the same on all ranks: indices of rows, those of the first rank first.
        counts: how many rows each rank has.
        region: of the ranks.
    """
    return cast(Tensor, Spread.apply(rows, places, counts, region))  # type: ignore[no-untyped-call]


def summed_backward(
    values: Tensor, region: Region, what: str = "add up the gradients of a cut layer's inputs"
) -> Tensor:
    """Whole values on their way into a layer that is cut."""
    return cast(Tensor, SummedBackward.apply(values, region, what))  # type: ignore[no-untyped-call]


def summed_forward(values: Tensor, region: Region, what: str = "add up the outputs of a cut layer") -> Tensor:
    """The sum of what the ranks computed."""
    return cast(Tensor, SummedForward.apply(values, region, what))  # type: ignore[no-untyped-call]


def gathered(values: Tensor, region: Region) -> Tensor:
    """What the ranks computed, side by side."""
    return cast(Tensor, Gathered.apply(values, region))  # type: ignore[no-untyped-call]
