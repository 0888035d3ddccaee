"""What happens where cut layers of a PyTorch model begin and end: sums over the ranks, other random numbers."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from hpctrain.comm.group import Group
from hpctrain.train.seeds import derive

HALVES = (torch.bfloat16, torch.float16)
"""Types that MPI cannot add, and in which sums would lose what single ranks have."""


class Region:
    """The part of a model in which each rank of a group has some of the values: behind ``columns``, before ``rows``.

    Dropout differs between the ranks there, and is equal outside. The streams inside are made of the one outside at
    each entry: they have no state that would have to be saved.

    Args:
        group: the ranks, all of which call every method in the same order.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.outside: list[tuple[torch.Generator, Tensor]] = []
        """While random numbers are those of the inside: the generators, and where they stood."""

    def enter(self, device: torch.device) -> None:
        """From here on each rank draws other random numbers."""
        if self.outside:
            return
        number = int(torch.randint(2**62, ()))
        generators = [torch.default_generator]
        if device.type == "cuda":
            generators.append(torch.cuda.default_generators[device.index or 0])
        self.outside = [(generator, generator.get_state()) for generator in generators]
        for generator in generators:
            generator.manual_seed(derive(number, self.group.rank))

    def leave(self) -> None:
        """From here on all draw the same again."""
        for generator, state in self.outside:
            generator.set_state(state)
        self.outside = []

    def summed(self, values: Tensor, what: str) -> Tensor:
        """A new tensor, the sum over the ranks, with the same bits on all of them; through host memory."""
        wide = torch.float32 if values.dtype in HALVES else values.dtype
        host = values.detach().to("cpu", wide, copy=True, memory_format=torch.contiguous_format)
        self.group.add(host.numpy(), what)
        return host.to(values.device, values.dtype)

    def gathered(self, values: Tensor, what: str) -> Tensor:
        """A new tensor, those of all ranks side by side along the last axis; through host memory."""
        host = values.detach().to("cpu").contiguous()
        everything = self.group.gather(host.view(-1).view(torch.uint8).numpy(), what)
        parts = [torch.from_numpy(np.array(part)).view(host.dtype).view(host.shape) for part in everything]
        return torch.cat(parts, -1).to(values.device)


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
