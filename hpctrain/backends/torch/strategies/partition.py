"""What a rank has of a PyTorch model. Parameters stay plain tensors, so any optimizer and reducer keeps working."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module, Parameter

from hpctrain.backends.torch.reduce.reducer import Reducer
from hpctrain.backends.torch.strategies.region import Region
from hpctrain.comm.group import Group
from hpctrain.errors import UserError
from hpctrain.train.state import Cut

Named: TypeAlias = Sequence[tuple[str, Tensor]]
CUT = (
    "With parallel.tensor a rank has some outputs of each layer with columns: infer how many heads there are with -1 "
    "in views, and let rows, gathers=True or classes=True follow"
)
"""Why a model fails on a partial tensor."""
SAME_LOSS = 1e-6
"""How far losses of ranks that hold parts of one model may differ, relative to one; they match bitwise when correct."""


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
        if not self.whole or 0 in self.whole:  # a number, or nothing: there are no parts
            yield held, Cut(self.whole, (0,) * len(self.whole), self.copy, self.copies)
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


class Partition:
    """What this rank has of a model: all of it, or parts of layers that are cut over the ranks of one group.

    Args:
        region: of the group.
        slices: what this rank has of each parameter that is cut, by name.
        cut: ids of these parameters.
    """

    sync_group: Group | None = None
    """Ranks that exchange something in each pass, and so make equally many; None if each makes its own."""

    def __init__(self, region: Region, slices: Mapping[str, Slices], cut: frozenset[int]) -> None:
        self.region = region
        self.group = region.group
        self.slices = slices
        self.cut = cut
        self.updaters = Group("data")
        """Ranks among which rows of what this one has are partitioned, to be updated; one if they are not."""
        self.held: Mapping[str, Parameter] = {}
        """Plain tensors in place of parameters that the model has as something else, by name."""
        self.places = slices
        """Where what this rank has of parameters lies in whole ones, by name."""

    @property
    def hint(self) -> str:
        """What authors of a model that is cut have to know, a sentence for messages; empty if it is whole."""
        return CUT if self.slices else ""

    @property
    def meets(self) -> bool:
        """Whether other ranks take part in forward passes."""
        return self.sync_group is not None or bool(self.slices)

    @property
    def complete(self) -> frozenset[int]:
        """Ids of parameters whose gradients are those of all ranks' samples as soon as a backward pass ends."""
        return frozenset()

    def parameters(self, model: Module) -> list[tuple[str, Parameter]]:
        """What this rank has, as plain tensors."""
        return [(name, self.held.get(name, one)) for name, one in model.named_parameters()]

    def update_among(self, updaters: Group) -> None:
        """From now on the rows of what this rank has are updated by these ranks, each some of them."""
        self.updaters = updaters

    def swap(self, parameters: Sequence[Tensor], others: Sequence[Tensor]) -> None:
        """Gives each parameter the values of another tensor, and that the parameter's."""
        for parameter, other in zip(parameters, others, strict=True):
            parameter.data, other.data = other.data, parameter.data

    def norm(self, reducer: Reducer) -> float:
        """L2 norm of all summed gradients, in which each element counts once; equal on all ranks. Collective."""
        return self.norm_of(reducer.summed()) if self.slices else reducer.norm()

    def norm_of(self, summed: Named) -> float:
        """See ``norm``.

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

    def try_loss(self, loss: Tensor) -> None:
        """Raises UserError if a loss of a dry call asks for more of the model than this rank has. Collective."""

    def shared(self, model: Module) -> list[tuple[str, Parameter]]:
        """Parameters that are replicated in the group."""
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
                f"in update {update} the losses of ranks of one model differ: {told}. They saw different "
                "samples, or partial values reached the loss",
                "cut the last layer by columns(gathers=True) or (hpctrain.cross_entropy) columns(classes=True), or let "
                "rows follow; and make transforms and streams depend on the sample and its rng only",
            )

    def require_whole_gradients(self, summed: Named, everyone: Group) -> None:
        """Raises UserError, on all ranks, if a replicated parameter's gradient differs in a tensor group. Collective.

        Args:
            summed: see ``norm_of``; ranks of a tensor group have the same.
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
                    f"the gradient of {odd} differs between ranks of one model: it works on values of "
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


def uncut() -> Partition:
    """A model that each rank has whole."""
    return Partition(Region(Group("tensor")), {}, frozenset())
