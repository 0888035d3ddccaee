"""The part of a PyTorch model that a rank has. Parameters stay plain tensors, so any optimizer and reducer works."""

from __future__ import annotations

import math
import zlib
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module, Parameter

from hpctrain.backends.torch.reduce.reducer import Reducer
from hpctrain.backends.torch.reduce.slots import norms_of
from hpctrain.backends.torch.strategies.tp_group import TPGroup
from hpctrain.comm.group import Group
from hpctrain.errors import UserError
from hpctrain.train.state import Cut

Named: TypeAlias = Sequence[tuple[str, Tensor]]
CUT = (
    "With parallel.tensor, a rank has only some outputs of a layer with columns: infer the number of heads with -1 in "
    "views, and let rows, gathers=True or classes=True follow"
)
"""Why a model fails on a partial tensor."""
SAME_LOSS = 1e-6
"""Allowed relative difference of losses within a tensor group; they match bitwise when correct."""


@dataclass(frozen=True)
class Slices:
    """Where a rank's values of a parameter are in the whole parameter.

    They are one or several equal ranges along one axis; of these, a rank may have only some rows.
    """

    whole: tuple[int, ...]
    """Shape of the whole parameter."""
    axis: int
    begins: tuple[int, ...]
    """Index along the axis, in the whole parameter, at which each range begins."""
    length: int
    """Length of each range along the axis."""
    copy: int
    """Index of this rank among those that have the same values."""
    copies: int
    """Number of ranks that have the same values."""
    rows: slice | None = None
    """Rows (first axis of the concatenated ranges) whose state this rank keeps; None: all of them."""

    @property
    def is_cut(self) -> bool:
        """Whether the ranges do not cover the whole parameter."""
        return bool(self.whole) and len(self.begins) * self.length < self.whole[self.axis]

    @property
    def starts(self) -> bool:
        """Whether this rank has the first value of the whole parameter."""
        return self.begins[0] == 0 and (self.rows is None or self.rows.start == 0)

    def of(self, whole: Tensor) -> Tensor:
        """Copies the ranges from a whole tensor."""
        return torch.cat([whole.narrow(self.axis, begin, self.length) for begin in self.begins], self.axis)

    def views(self, held: Tensor) -> Iterator[tuple[Tensor, Cut]]:
        """Yields a view of each contiguous part of what this rank has, and its place in the whole tensor."""
        if not self.whole or 0 in self.whole:  # a scalar or an empty tensor has no ranges
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
    """The part of a model that this rank has: all of it, or parts of layers that are split over a group.

    Args:
        tp_group: the ranks that split layers, and their communication.
        slices: what this rank has of each split parameter, by name.
        cut: ids of these parameters.
    """

    sync_group: Group | None = None
    """Ranks that communicate in each pass and so need the same number of passes; None if passes are independent."""

    def __init__(self, tp_group: TPGroup, slices: Mapping[str, Slices], cut: frozenset[int]) -> None:
        self.tp_group = tp_group
        self.group = tp_group.group
        self.slices = slices
        self.cut = cut
        self.updaters = Group("data")
        """Ranks that each update some rows of what this rank has; this rank alone if updates are not sharded."""
        self.held: Mapping[str, Parameter] = {}
        """Plain tensors in place of parameters that are something else in the model, by name."""
        self.places = slices
        """Where this rank's values of parameters are in whole ones, by name."""

    @property
    def hint(self) -> str:
        """A hint for authors of split models, a sentence for messages; empty if the model is whole."""
        return CUT if self.slices else ""

    @property
    def is_collective(self) -> bool:
        """Whether forward passes are collective."""
        return self.sync_group is not None or bool(self.slices)

    def parameters(self, model: Module) -> list[tuple[str, Parameter]]:
        """This rank's parameters as plain tensors."""
        return [(name, self.held.get(name, one)) for name, one in model.named_parameters()]

    def update_among(self, updaters: Group) -> None:
        """Sets the ranks that share the update, each of which updates some rows."""
        self.updaters = updaters

    def swap(self, parameters: Sequence[Tensor], others: Sequence[Tensor]) -> None:
        """Swaps the values of each parameter with those of another tensor."""
        for parameter, other in zip(parameters, others, strict=True):
            parameter.data, other.data = other.data, parameter.data

    def norm(self, reducer: Reducer) -> float:
        """L2 norm of all summed gradients, counting each element once; equal on all ranks. Collective."""
        return self.norm_of(reducer.summed()) if self.slices else reducer.norm()

    def norm_of(self, summed: Named) -> float:
        """The norm, from parameters with gradients; see ``norm``.

        Args:
            summed: what this rank's optimizer updates, with gradients, by parameter name.
        """
        have = [(name, values_of(one.grad)) for name, one in summed if one.grad is not None]
        squares = squares_of([gradient for _, gradient in have]).tolist()
        own = sum(square for (name, _), square in zip(have, squares, strict=True) if name in self.slices)
        shared = sum(square for (name, _), square in zip(have, squares, strict=True) if name not in self.slices)
        total = shared + float(self.tp_group.gather(np.array([own]), "add up the squares of the gradients").sum())
        if self.updaters.size > 1:
            total = float(self.updaters.gather(np.array([total]), "add up the squares of all rows").sum())
        return math.sqrt(total)

    def rows(self, name: str, shape: tuple[int, ...], begin: int, end: int) -> Slices:
        """Which rows of a parameter only this rank of ``updaters`` updates.

        Args:
            name: name of the parameter.
            shape: shape of what this rank has of it.
            begin, end: first row and one past the last one; a scalar has one row.
        """
        known = self.slices.get(name)
        if known is not None:
            return replace(known, copy=0, copies=1, rows=slice(begin, end))
        length = shape[0] if shape else 1
        return Slices(shape, 0, (0,), length, self.group.rank, self.group.size, slice(begin, end))

    def leave(self) -> None:
        """Ends a forward pass."""
        self.tp_group.forget_inputs()

    def free(self) -> None:
        """Frees what passes have gathered."""

    def leave_out(self, modules: Container[object]) -> None:
        """Leaves modules that the next backward pass does not reach out of what it communicates."""

    def try_loss(self, loss: Tensor) -> None:
        """Raises UserError if a dry call's loss needs more of the model than this rank has. Collective."""

    def shared(self, model: Module) -> list[tuple[str, Parameter]]:
        """Parameters that are replicated within the group."""
        return [(name, one) for name, one in self.parameters(model) if id(one) not in self.cut]

    def require_same_update(
        self, loss: tuple[float, float] | None, reducer: Reducer, update: int, everyone: Group
    ) -> None:
        """Raises UserError, on all ranks, if ranks of one model disagree: on the loss or, in the first update, on
        gradients that they should share. Collective.

        Args:
            loss: (sum, weight) over this rank's samples; None if it need not be equal to the last digits.
            reducer: has summed the gradients.
            update: number of the update.
            everyone: the ranks of all tensor groups.
        """
        if self.slices and loss is not None:
            self.require_same_loss(loss, update)
        if self.slices and update == 1:
            self.require_whole_gradients(reducer.summed(), everyone)

    def require_same_loss(self, loss: tuple[float, float], update: int) -> None:
        """Raises UserError, on all ranks of the group, if their losses differ. Collective.

        Args:
            loss: (sum, weight) over this rank's samples.
            update: number of the update, for messages.
        """
        found = self.tp_group.gather(np.array(loss), "compare their losses")
        if not np.allclose(found, found[0], rtol=SAME_LOSS, atol=0, equal_nan=True):
            shown = " and ".join(f"{total:g} (of {weight:g})" for total, weight in found.tolist())
            raise UserError(
                f"in update {update} the losses of ranks of one model differ: {shown}. They saw different "
                "samples, or partial values reached the loss",
                "split the last layer by columns(gathers=True) or (hpctrain.cross_entropy) columns(classes=True), or "
                "let rows follow; and make transforms and streams depend on the sample and its rng only",
            )

    def require_whole_gradients(self, summed: Named, everyone: Group) -> None:
        """Raises UserError, on all ranks, if replicated gradients differ within a tensor group. Collective.

        Args:
            summed: see ``norm_of``; names are the same within a tensor group.
            everyone: the ranks of all tensor groups.
        """
        sums = {
            name: zlib.crc32(values_of(one.grad.detach()).contiguous().view(-1).view(torch.uint8).numpy().data)
            for name, one in summed
            if name not in self.slices
            if one.grad is not None and one.device.type == "cpu"  # GPU kernels may add in any order
        }
        of_ranks = everyone.allgather(sums, "compare replicated gradients")
        for rank, found in enumerate(of_ranks):
            first = of_ranks[rank - rank % self.group.size]
            odd = next((name for name in first if found.get(name) != first[name]), None)
            if odd is not None:
                raise UserError(
                    f"the gradient of {odd} differs between ranks of one model: it works on values of "
                    "which each rank has a part, but is not split itself",
                    "split its layer too, or use it before a layer with columns or after one with rows",
                )


def values_of(gradient: Tensor) -> Tensor:
    """A gradient's values; of a sparse one, each row once."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def squares_of(gradients: Sequence[Tensor]) -> Tensor:
    """The sum of the squares of each one's elements, as one float64 tensor on their device."""
    norms = norms_of(gradients) if gradients else ()
    return torch.stack(norms).double().square() if norms else torch.zeros(0, dtype=torch.float64, device="cpu")


def uncut() -> Partition:
    """The partition of a model that each rank has as a whole."""
    return Partition(TPGroup(Group("tensor")), {}, frozenset())
