"""Averages the gradients of a torch model over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch.nn import Parameter

from hpctrain.backends.torch.reduce import allreduce
from hpctrain.backends.torch.reduce.gradients import FlatGradients, Sparse, SparseGradients, densify
from hpctrain.backends.torch.reduce.slots import Number, fill_slots, norm_of, read_behind
from hpctrain.reduce.flat_layout import SLOTS, ExchangeResult, read_slots
from hpctrain.train.clock import StepClock


class Reducer(Protocol):
    """Sums gradients over ranks, so that they become those of the global batch.

    Each update calls ``begin``, backward (if several times, with ``last_backward`` False before all but the last), and
    ``exchange``. Losses must be scaled before backward as ExchangeResult describes; afterwards, ``grad`` of each
    parameter is the sum.
    """

    name: str
    """Name of the candidate, such as mpi-node."""
    last_backward: bool = True
    """Whether the next backward completes the gradients, so that they may be sent while it runs."""

    def begin(self) -> None:
        """Drops all gradients."""

    def begin_pass(self, is_last: bool, goes_on: bool = False) -> None:
        """Sets ``last_backward``, before each forward and each backward pass. Collective if each pass is summed.

        Args:
            is_last: whether this is the update's last backward pass.
            goes_on: whether a pass follows in which no rank computes with samples of others.
        """
        self.last_backward = is_last

    def before_backward(self, totals: Callable[[], tuple[Number, Number | None]]) -> None:
        """Called before each backward pass of an update; ``totals`` returns what ``exchange`` would get after it."""
        return

    def before_reading(self, act: Callable[[torch.Tensor], object]) -> bool:
        """Has the next ``exchange`` of this update call ``act`` once it has launched everything, with the numbers that
        it is going to read: slots, and the norm if it is needed. Returns whether it will."""
        return False

    def exchange(self, loss: Number = 0.0, weight: Number | None = None) -> ExchangeResult:
        """Sums gradients over the ranks; returns the loss and divisor sent with them. Collective.

        Args:
            loss: this rank's part of the mean loss; or its loss sum over ``global_samples`` if a weight is given.
            weight: this rank's weight, over ``global_samples``, of a (sum, weight) loss.
        """

    def gradients(self) -> list[torch.Tensor]:
        """Tensors with the summed gradients that this rank's optimizer uses, to be scaled in place."""

    def parts(self, clock: StepClock) -> Iterator[list[torch.Tensor]]:
        """Yields ``gradients``, at once or, in a StreamedReducer, as they arrive."""
        yield self.gradients()

    def norm(self) -> float:
        """L2 norm of all summed gradients."""

    def summed(self) -> Sequence[tuple[str, torch.Tensor]]:
        """Parameters by name, or this rank's parts of them, with summed gradients in ``grad``. Used for norms: if each
        element counts once over the ranks, parameters that all ranks update count on one rank only."""

    def gather_parameters(self) -> bool:
        """After the optimizer's step, sends what only this rank has updated to all. Returns whether ranks do so."""
        return False

    def close(self) -> None:
        """Stops taking gradients, ends threads and frees memory."""


class WithNorm(Reducer):
    """A reducer that reads the norm, if each update needs it, together with the loss: a GPU is then waited for once."""

    needs_norm: bool
    known_norm: float | None = None
    """The norm of this update's gradients, if ``exchange`` has read it."""
    act: Callable[[torch.Tensor], object] | None = None
    """See ``before_reading``."""

    def before_reading(self, act: Callable[[torch.Tensor], object]) -> bool:
        self.act = act
        return True

    def norm(self) -> float:
        """See Reducer."""
        return float(norm_of(self.gradients())) if self.known_norm is None else self.known_norm

    def read(self, slots: torch.Tensor) -> ExchangeResult:
        """Reads the summed slots, and the norm if it is needed."""
        numbers = torch.cat([slots, norm_of(self.gradients()).to(slots).view(1)]) if self.needs_norm else slots
        found = read_behind(numbers, self.act)
        self.known_norm = found[SLOTS] if self.needs_norm else None
        return read_slots(found)


class NoReducer(WithNorm):
    """For one rank: gradients stay where autograd puts them."""

    name = "none"

    def __init__(
        self,
        parameters: Sequence[tuple[str, Parameter]],
        tables: SparseGradients | None = None,
        sparse: Sparse = "auto",
        needs_norm: bool = False,
    ) -> None:
        self.needs_norm = needs_norm
        self.named = parameters
        self.parameters = [parameter for _, parameter in parameters]
        self.tables = tables or SparseGradients(())
        self.sparse = sparse

    def begin(self) -> None:
        self.known_norm = self.act = None
        for parameter in self.parameters:
            parameter.grad = None
        self.tables.begin()

    def exchange(self, loss: Number = 0.0, weight: Number | None = None) -> ExchangeResult:
        self.complete()
        known = [*self.parameters, *self.tables.parameters]
        device = known[0].device if known else torch.device("cpu")
        slots = torch.zeros(SLOTS, dtype=torch.float64, device=device)
        fill_slots(slots, loss, weight)
        return self.read(slots)

    def complete(self) -> None:
        """Gives zeros to parameters without a gradient, and makes gradients dense that must be."""
        for name, parameter in self.named:
            if parameter.grad is None:  # as with several ranks, which cannot tell if it is unused on all of them
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
            elif parameter.grad.is_sparse:
                parameter.grad = densify(name, parameter.grad, self.sparse)
        self.separate()
        self.tables.exchange()

    def begin_pass(self, is_last: bool, goes_on: bool = False) -> None:
        """See Reducer."""
        super().begin_pass(is_last, goes_on)
        self.separate()

    def separate(self) -> None:
        """Gives each gradient its own memory. Autograd may give the same to several parameters (``a[None] + b[None]``),
        and what is added to one, or scales it, would change the others."""
        known = set[int]()
        for parameter in self.parameters:
            if (gradient := parameter.grad) is not None and not gradient.is_sparse:
                place = gradient.data_ptr()
                if place in known:
                    parameter.grad = gradient.clone()
                known.add(place)

    def gradients(self) -> list[torch.Tensor]:
        dense = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        return [*dense, *self.tables.gradients()]

    def summed(self) -> Sequence[tuple[str, torch.Tensor]]:
        return self.named

    def close(self) -> None:
        self.tables.close()


class ByFlatGradients:
    """A reducer whose ``last_backward`` is that of its flat gradients."""

    flat_gradients: FlatGradients

    @property
    def last_backward(self) -> bool:
        """See Reducer."""
        return self.flat_gradients.last_backward

    @last_backward.setter
    def last_backward(self, value: bool) -> None:
        self.flat_gradients.last_backward = value


class FlatReducer(ByFlatGradients, WithNorm):
    """Sums gradients in one flat buffer over the ranks, and those of tables separately.

    Args:
        name: name of the candidate.
        flat_gradients: the gradients in the flat buffer.
        sum_: sums the flat buffer.
        tables: sums the rows of tables.
        needs_norm: whether each update needs the norm.
    """

    def __init__(
        self,
        name: str,
        flat_gradients: FlatGradients,
        sum_: allreduce.TensorAllreduce,
        tables: SparseGradients | None = None,
        needs_norm: bool = False,
    ) -> None:
        self.name = name
        self.flat_gradients = flat_gradients
        self.sum = sum_
        self.tables = tables or SparseGradients(())
        self.needs_norm = needs_norm
        self.converts = any(one.dtype.to_real() != sum_.flat.dtype for one in flat_gradients.parameters)
        self.slots = sum_.flat[flat_gradients.layout.gradients :]
        flat_gradients.attach()

    def begin(self) -> None:
        self.known_norm = self.act = None
        self.flat_gradients.begin()
        self.tables.begin()

    def exchange(self, loss: Number = 0.0, weight: Number | None = None) -> ExchangeResult:
        fill_slots(self.slots.zero_(), loss, weight)
        self.flat_gradients.complete()
        self.finish()
        self.tables.exchange()
        return self.read(self.slots)

    def finish(self) -> None:
        """Waits until all dense gradients are summed."""
        self.sum.finish()
        self.flat_gradients.publish()
        self.flat_gradients.restart()

    def gradients(self) -> list[torch.Tensor]:
        dense = self.flat_gradients.values()
        if self.converts:  # then ``grad`` is not always a view of the buffer
            dense = [parameter.grad for parameter in self.flat_gradients.parameters if parameter.grad is not None]
        return [*dense, *self.tables.gradients()]

    def summed(self) -> Sequence[tuple[str, torch.Tensor]]:
        return self.flat_gradients.named

    def close(self) -> None:
        self.flat_gradients.detach()
        self.sum.close()
        self.tables.close()
