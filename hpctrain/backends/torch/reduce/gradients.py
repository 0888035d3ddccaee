"""The gradients of a torch model: in one flat buffer, or as rows of embedding tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Literal

import torch
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from hpctrain.backends.torch.process_groups import ProcessGroup
from hpctrain.backends.torch.reduce.rows import GroupRows
from hpctrain.comm.group import Group
from hpctrain.errors import UserError
from hpctrain.reduce.flat_layout import Layout
from hpctrain.reduce.row_exchange import RowExchange, SparseRows

Sparse = Literal["auto", "densify", "refuse"]
AUTOGRADS = 2
"""Uses of a gradient's memory while autograd accumulates it: what came out of backward, and ``grad``."""


class FlatGradients:
    """Copies each gradient into the flat buffer as soon as backward has computed it, while it is still in cache.

    Backward runs with ``grad`` None, so autograd hands over its own tensor instead of adding to zeros: copying it takes
    one pass, where accumulating into a view takes two, and clearing the view another. Those of ``layout.apart`` stay
    where they are, unless that memory has other uses. After the exchange, ``publish`` sets each ``grad``.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, Parameter]],
        flat: torch.Tensor,
        layout: Layout,
        ready: Callable[[int], None],
        sparse: Sparse = "auto",
        elsewhere: dict[int, torch.Tensor] | None = None,
    ) -> None:
        """``ready(bucket)`` is called once all gradients of this and all earlier buckets are there.

        ``elsewhere`` holds those that are not in the buffer, in one dimension, by their first element there.
        """
        self.named = parameters
        self.names = [name for name, _ in parameters]
        self.parameters = [parameter for _, parameter in parameters]
        self.flat = flat
        self.layout = layout
        self.views = [
            view_like(parameter, flat, offset)
            for parameter, offset in zip(self.parameters, layout.offsets, strict=True)
        ]
        self.ready = ready
        self.sparse = sparse
        self.elsewhere = {} if elsewhere is None else elsewhere
        self.places = list(self.views)
        """Where this update's gradients are."""
        self.bucket_of = [0] * len(parameters)
        for number, bucket in enumerate(layout.buckets):
            for index in bucket.members:
                self.bucket_of[index] = number
        self.filled = [False] * len(parameters)
        self.missing = [set(bucket.members) for bucket in layout.buckets]
        """Parameters whose gradients the last backward pass has not computed yet, by bucket."""
        self.sent = 0
        self.last_backward = True
        self.is_under_way = True
        """False between an exchange and the next update, when gradients computed by hooks or metrics are not sent."""
        self.handles: list[RemovableHandle] = []

    def attach(self) -> None:
        """Starts taking gradients."""
        frozen = [parameter for parameter in self.parameters if not parameter.requires_grad]
        for parameter in frozen:  # PyTorch refuses hooks on them
            parameter.requires_grad_(True)
        self.handles = [
            parameter.register_post_accumulate_grad_hook(partial(self._take, index))
            for index, parameter in enumerate(self.parameters)
        ]
        for parameter in frozen:
            parameter.requires_grad_(False)

    def detach(self) -> None:
        """Stops taking gradients, and clears them."""
        for handle in self.handles:
            handle.remove()
        self.handles = []
        self._drop()

    def begin(self) -> None:
        """Starts an update: drops all gradients, even those of backward passes outside updates (hooks, metrics)."""
        self.restart()
        self.is_under_way = True
        self._drop()

    def _drop(self) -> None:
        self.places = list(self.views)
        self.elsewhere.clear()
        for parameter in self.parameters:
            parameter.grad = None

    def values(self) -> list[torch.Tensor]:
        """All gradients in one dimension, divided as they are sent."""
        parts = self.layout.messages(0, self.layout.gradients)
        return [self.elsewhere.get(begin, self.flat[begin:end]) for begin, end in parts]

    def complete(self) -> None:
        """Backward is over: gradients that were not computed become zeros, and all remaining buckets are sent."""
        for index, filled in enumerate(self.filled):
            if not filled:
                self.places[index].zero_()
        while self.sent < len(self.layout.buckets):
            self.ready(self.sent)
            self.sent += 1

    def publish(self, only: Iterable[int] | None = None) -> None:
        """Sets ``grad`` to the sums for all parameters, or those in ``only``; for others and frozen ones, to None."""
        chosen = range(len(self.parameters)) if only is None else set(only)
        for index, (parameter, view) in enumerate(zip(self.parameters, self.places, strict=True)):
            grad = view if parameter.dtype == view.dtype else view.to(parameter.dtype)
            parameter.grad = grad if index in chosen and parameter.requires_grad else None

    def restart(self) -> None:
        """Prepares the buffer for the gradients of another update."""
        self.filled = [False] * len(self.parameters)
        self.missing = [set(bucket.members) for bucket in self.layout.buckets]
        self.sent = 0
        self.is_under_way = False

    def _take(self, index: int, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        view = self.places[index]
        if gradient is not view and gradient is not None:
            if gradient.is_sparse:
                gradient = densify(self.names[index], gradient, self.sparse)
            if self.filled[index]:
                view.add_(gradient)
            elif index in self.layout.apart and replaces(gradient, view) and is_own(gradient, parameter):
                self.places[index] = gradient
                numbers = as_real(gradient)
                self.elsewhere[self.layout.offsets[index]] = numbers.as_strided((numbers.numel(),), (1,))
            else:
                view.copy_(gradient)
            parameter.grad = None
        self.filled[index] = True
        if self.last_backward and self.is_under_way:
            self._count(index)

    def _count(self, index: int) -> None:
        number = self.bucket_of[index]
        if number < self.sent:
            raise UserError(
                f"the gradient of {self.names[index]} changed after it was sent: an update has several backward passes",
                "set reducer.last_backward = False before all but the last, or reduce.overlap: off",
            )
        self.missing[number].discard(index)
        while self.sent < len(self.missing) and not self.missing[self.sent]:
            if self.sent == len(self.missing) - 1:
                return  # the last bucket carries the loss, which is known only after backward
            self.ready(self.sent)
            self.sent += 1


def densify(name: str, gradient: torch.Tensor, sparse: Sparse) -> torch.Tensor:
    """Makes a sparse gradient dense; raises UserError if ``reduce.sparse`` is ``refuse``."""
    if sparse == "refuse":
        raise UserError(
            f"the gradient of {name} is sparse", "make the layer with sparse=False, or set reduce.sparse: densify"
        )
    return gradient.to_dense()


def as_real(values: torch.Tensor) -> torch.Tensor:
    """The real numbers of a tensor; of a complex one, its real and imaginary parts, which can be summed as they are."""
    return torch.view_as_real(values.detach()) if values.is_complex() else values


def view_like(parameter: torch.Tensor, flat: torch.Tensor, offset: int) -> torch.Tensor:
    """A view with the parameter's shape and, if it is dense, its strides, since fused optimizers need equal strides."""
    part = flat[offset : offset + as_real(parameter).numel()]
    if parameter.is_complex():
        part = torch.view_as_complex(part.view(-1, 2))
    if torch.empty_like(parameter, device="meta").stride() == parameter.stride():  # dense, in any memory order
        return part.as_strided(parameter.size(), parameter.stride())
    return part.view(parameter.size())


def replaces(gradient: torch.Tensor, view: torch.Tensor) -> bool:
    """Whether a gradient could be used in place of its view of the buffer."""
    is_alike = type(gradient) is torch.Tensor and gradient.dtype == view.dtype and gradient.stride() == view.stride()
    return is_alike and not (gradient.is_conj() or gradient.is_neg())  # which other values in memory stand for


def is_own(gradient: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether only autograd uses this memory, asked in a hook of the parameter.

    The gradient of an activation may be the same memory (``x + weight[None]``) and still be needed by backward; and
    other hooks may keep what they see.
    """
    count = getattr(torch._C, "_storage_Use_Count", None)  # old builds for CPUs lack it
    is_shared = count is None or count(gradient.untyped_storage()._cdata) > AUTOGRADS
    return not is_shared and len(parameter._post_accumulate_grad_hooks or ()) == 1


def watched(parameter: torch.Tensor) -> bool:
    """Whether hooks are called with a parameter's gradients."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


class SparseGradients:
    """Sums sparse gradients, which autograd collects over the backward passes of an update.

    Afterwards each ``grad`` is sparse; after a sum over ranks it is coalesced, with ascending, unique rows. A dense
    gradient (of a table also used as a matrix) counts as having all rows.

    Args:
        parameters: tables with two axes, all on one device.
        over: process group of the ranks, or the ranks if rows go through host memory; None for one process.
        dtype: dtype of sums over ranks.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        over: ProcessGroup | Group | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.parameters = parameters
        self.dtype = dtype
        shapes = [(parameter.shape[0], parameter.shape[1]) for parameter in parameters]
        self.rows: GroupRows | RowExchange | None = None
        if isinstance(over, ProcessGroup):
            self.rows = GroupRows(over, shapes, dtype)
        elif over is not None and parameters:
            self.rows = RowExchange(over, shapes, torch.empty(0, dtype=dtype, device="cpu").numpy().dtype)
        checks = torch.sparse.check_sparse_tensor_invariants
        if parameters and not checks.is_enabled():
            checks.disable()  # the default, but explicit: otherwise PyTorch's own optimizers warn

    def begin(self) -> None:
        """Starts an update: drops all gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    def exchange(self) -> None:
        """Replaces the parameters' gradients by their sums over the ranks."""
        if self.rows is None:
            for parameter in self.parameters:
                if parameter.grad is None or not parameter.grad.is_sparse:
                    parameter.grad = _sparse(parameter, *_rows_of(parameter))
            return
        found = [_rows_of(parameter) for parameter in self.parameters]
        if isinstance(self.rows, GroupRows):
            for parameter, (indices, values) in zip(self.parameters, self.rows.sum(found), strict=True):
                parameter.grad = _sparse(parameter, indices, values)
            return
        host = [SparseRows(indices.cpu().numpy(), values.to("cpu", self.dtype).numpy()) for indices, values in found]
        for parameter, rows in zip(self.parameters, self.rows.sum(host), strict=True):
            parameter.grad = _sparse(parameter, torch.from_numpy(rows.indices), torch.from_numpy(rows.values))

    def gradients(self) -> list[torch.Tensor]:
        """The values of the gradients' rows, each row once, to be changed in place."""
        found = []
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.coalesce()
                found.append(parameter.grad._values())
        return found

    def close(self) -> None:
        """Drops gradients and frees the communicator."""
        self.begin()
        if self.rows is not None:
            self.rows.close()


def _rows_of(parameter: Parameter) -> tuple[torch.Tensor, torch.Tensor]:
    """(indices, values) of this rank's gradient, with unique rows."""
    gradient = parameter.grad
    if gradient is None:
        return parameter.new_empty(0, dtype=torch.int64), parameter.new_empty((0, parameter.shape[1]))
    if not gradient.is_sparse:
        return torch.arange(len(gradient), device=gradient.device), gradient.detach()
    gradient = gradient.coalesce()
    return gradient._indices()[0], gradient._values()


def _sparse(parameter: Parameter, indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """A gradient of these rows, ascending and unique."""
    return torch.sparse_coo_tensor(
        indices.to(parameter.device)[None],
        values.to(parameter.device, parameter.dtype),
        parameter.shape,
        is_coalesced=True,
        check_invariants=False,
    )
