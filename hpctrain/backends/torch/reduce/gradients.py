"""The gradients of a torch model in one flat buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Literal

import torch
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from hpctrain.errors import UserError
from hpctrain.reduce.layout import Layout

Sparse = Literal["auto", "densify", "refuse"]


class FlatGradients:
    """Takes each gradient into the flat buffer the moment backward has it, while it is still in the core's cache.

    Backward runs with ``grad`` None, so autograd hands over its own result instead of adding to zeros: copying that
    costs one pass where accumulating into a view costs two, and clearing it one. After the exchange
    ``publish`` makes each ``grad`` a view of the buffer.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, Parameter]],
        flat: torch.Tensor,
        layout: Layout,
        ready: Callable[[int], None],
        sparse: Sparse = "auto",
    ) -> None:
        """``ready(bucket)`` is called once all gradients of a bucket, and of those before it, are in the buffer."""
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
        self.bucket_of = [0] * len(parameters)
        for number, bucket in enumerate(layout.buckets):
            for index in bucket.members:
                self.bucket_of[index] = number
        self.filled = [False] * len(parameters)
        self.missing = [len(bucket.members) for bucket in layout.buckets]
        self.sent = 0
        self.last_backward = True
        self.is_under_way = True
        """False between an exchange and the next update: what a hook or a metric derives then is not sent."""
        self.handles: list[RemovableHandle] = []

    def attach(self) -> None:
        """Begins to take gradients."""
        frozen = [parameter for parameter in self.parameters if not parameter.requires_grad]
        for parameter in frozen:  # PyTorch would refuse the hook
            parameter.requires_grad_(True)
        self.handles = [
            parameter.register_post_accumulate_grad_hook(partial(self._take, index))
            for index, parameter in enumerate(self.parameters)
        ]
        for parameter in frozen:
            parameter.requires_grad_(False)

    def detach(self) -> None:
        """Ends it; gradients are autograd's again."""
        for handle in self.handles:
            handle.remove()
        self.handles = []
        for parameter in self.parameters:
            parameter.grad = None

    def begin(self) -> None:
        """A new update: forgets all gradients, those of a backward pass outside updates (a hook's, a metric's) too."""
        self.restart()
        self.is_under_way = True
        for parameter in self.parameters:
            parameter.grad = None

    def complete(self) -> None:
        """Backward is over: parameters that took no part in it contribute zeros, and what was not sent is sent."""
        for index, filled in enumerate(self.filled):
            if not filled:
                self.views[index].zero_()
        while self.sent < len(self.layout.buckets):
            self.ready(self.sent)
            self.sent += 1

    def publish(self, only: Iterable[int] | None = None) -> None:
        """Makes the sums the parameters' gradients, or those of some parameters; the others, and frozen ones, then have
        none."""
        chosen = range(len(self.parameters)) if only is None else set(only)
        for index, (parameter, view) in enumerate(zip(self.parameters, self.views, strict=True)):
            grad = view if parameter.dtype == view.dtype else view.to(parameter.dtype)
            parameter.grad = grad if index in chosen and parameter.requires_grad else None

    def parts(self, most: int) -> list[tuple[range, slice, list[int]]]:
        """Neighbouring buckets of nearly equal size together: their numbers, their elements, their parameters."""
        found: list[tuple[range, slice, list[int]]] = []
        first, members = 0, list[int]()
        for number, bucket in enumerate(self.layout.buckets):
            begin = self.layout.buckets[first].begin
            members.extend(bucket.members)
            end = min(bucket.end, self.layout.gradients)
            if (end - begin) * most >= self.layout.gradients or number == len(self.layout.buckets) - 1:
                found.append((range(first, number + 1), slice(begin, end), members))
                first, members = number + 1, []
        return found

    def restart(self) -> None:
        """The buffer may take the gradients of another update."""
        self.filled = [False] * len(self.parameters)
        self.missing = [len(bucket.members) for bucket in self.layout.buckets]
        self.sent = 0
        self.is_under_way = False

    def _take(self, index: int, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        view = self.views[index]
        if gradient is not view and gradient is not None:
            if gradient.is_sparse:
                gradient = densify(self.names[index], gradient, self.sparse)
            if self.filled[index]:
                view.add_(gradient)
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
        self.missing[number] -= 1
        while self.sent < len(self.missing) and self.missing[self.sent] <= 0:
            if self.sent == len(self.missing) - 1:
                return  # the last bucket carries the loss, which is known when backward has returned
            self.ready(self.sent)
            self.sent += 1


def densify(name: str, gradient: torch.Tensor, sparse: Sparse) -> torch.Tensor:
    """A sparse gradient as a dense tensor, or UserError if that is not wanted."""
    if sparse == "refuse":
        raise UserError(
            f"the gradient of {name} is sparse", "make the layer with sparse=False, or set reduce.sparse: densify"
        )
    return gradient.to_dense()


def view_like(parameter: torch.Tensor, flat: torch.Tensor, offset: int) -> torch.Tensor:
    """A view of the parameter's shape and, if it is dense, its strides: fused optimizers want the same for both."""
    part = flat[offset : offset + parameter.numel()]
    if torch.empty_like(parameter, device="meta").stride() == parameter.stride():  # dense, in whatever order
        return part.as_strided(parameter.size(), parameter.stride())
    return part.view(parameter.size())


def watched(parameter: torch.Tensor) -> bool:
    """Whether something is called with a parameter's gradients."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)
