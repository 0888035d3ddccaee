"""Messages between neighbouring pipeline stages: activations forward, gradients back."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from numpy.typing import NDArray
from torch import Tensor

from hpctrain.backends.torch.strategies.exchange import Exchange, HostExchange
from hpctrain.comm.group import Group
from hpctrain.errors import UserError, kind_of
from hpctrain.train.clock import NO_CLOCK, Neighbours, StepClock, Waiting

DTYPES = {
    str(one): one
    for one in (
        *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.complex128),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}
"""Dtypes of tensors that can be sent, by name."""
PLAIN = (bool, int, float, str, type(None))
"""Types of other values that can be sent."""
ACTIVATION, GRADIENT, OUTPUT, LOSS, TIED = range(5)
"""Tags of messages; of those to other chunks than the first, ``TAGS`` times its index more."""
TAGS = 5


@dataclass(frozen=True)
class Received:
    """A micro-batch's value from the previous stage."""

    value: Any
    entered: Sequence[Tensor]
    """Its tensors whose gradients are sent back."""
    gradients: Sequence[Tensor]
    """Their gradients, once the backward pass has computed them."""


@dataclass(frozen=True)
class Coming:
    """Tensors that are being received."""

    tensors: Sequence[Tensor]
    """The tensors being filled."""
    finish: Sequence[Callable[[str], None]]
    """One function per tensor that waits for it."""
    what: str
    """Completes "waited for the other ranks to ..." in errors."""
    structure: Any = None
    """Describes the value that they belong to."""
    wanting: Sequence[int] = ()
    """Indices of the tensors whose gradients are sent back."""

    def wait(self) -> list[Tensor]:
        """The tensors, once they have been received."""
        for finish in self.finish:
            finish(self.what)
        return list(self.tensors)


class Entered(torch.autograd.Function):
    """Enters tensors from another rank into this rank's graph; collects their gradients."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensors: list[Tensor], gradients: list[Tensor]) -> tuple[Tensor, ...]:
        ctx.gradients = gradients
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        ctx.gradients.extend(gradients)
        return None, None, None


class Stage:
    """A rank's messages with the other stages of its model. It has one stage, or several (``chunks``): its chunk ``c``
    is stage ``c * size + rank``.

    Args:
        group: the ranks, in the order of their first stages.
        device: device of the model.
        chunks: number of stages of each rank.
        clock: records the time in which this rank waits for other stages.
        exchange: exchanges tensors between the stages; by default through host memory, as descriptions of values and
            the loss always are.
    """

    def __init__(
        self,
        group: Group,
        device: torch.device,
        clock: StepClock = NO_CLOCK,
        exchange: Exchange | None = None,
        chunks: int = 1,
    ) -> None:
        self.group, self.device, self.chunks = group, device, chunks
        self.rank, self.last = group.rank, group.size - 1
        self.host = HostExchange(group, Waiting(clock, Neighbours.PIPELINE))
        self.exchange: Exchange = exchange or self.host
        self.sent_structures: dict[tuple[int, int], bytes] = {}
        """Description of the last value sent, by rank and tag; an unchanged one is not sent again."""
        self.received_structures: dict[tuple[int, int], bytes] = {}

    def is_first(self, chunk: int) -> bool:
        """Whether a chunk of this rank gets the inputs."""
        return self.rank == chunk == 0

    def is_last(self, chunk: int) -> bool:
        """Whether a chunk of this rank computes the outputs, and so the loss."""
        return self.rank == self.last and chunk == self.chunks - 1

    def place(self, chunk: int, hops: int) -> tuple[int, int]:
        """Rank and chunk of the stage that is ``hops`` stages after a chunk of this rank."""
        stage = chunk * self.group.size + self.rank + hops
        return stage % self.group.size, stage // self.group.size

    def send(self, value: Any, rank: int, tag: int) -> list[Tensor]:
        """Sends a value and its description; returns those of its tensors whose gradients will come back."""
        tensors: list[Tensor] = []
        structure = json.dumps(described(value, tensors)).encode()
        text = b"" if self.sent_structures.get((rank, tag)) == structure else structure
        self.sent_structures[rank, tag] = structure
        self.host.post(torch.tensor([len(text)], device="cpu"), rank, tag)
        self.host.post(torch.tensor(list(text), dtype=torch.uint8, device="cpu"), rank, tag)
        for tensor in tensors:  # the task may change one without gradient in place while it is being sent
            self.exchange.post(tensor if wants_gradient(tensor) else tensor.clone(), rank, tag)
        return [tensor for tensor in tensors if wants_gradient(tensor)]

    def pass_on(self, value: Any, chunk: int) -> list[Tensor]:
        """Sends what a chunk returned to the next stage; see ``send``."""
        rank, other = self.place(chunk, 1)
        return self.send(value, rank, ACTIVATION + TAGS * other)

    def begin(self, chunk: int) -> Coming:
        """Begins to receive what ``pass_on`` sends to a chunk."""
        rank, _ = self.place(chunk, -1)
        return self.begin_receive(rank, ACTIVATION + TAGS * chunk, "pass activations on")

    def receive(self, coming: Coming) -> Received:
        """Waits for a value that is being received."""
        tensors, wanting = coming.wait(), coming.wanting
        entered = [tensors[number] for number in wanting]
        gradients = list[Tensor]()
        if entered:
            anchor = torch.empty(0, requires_grad=True, device="cpu")
            through = Entered.apply(anchor, entered, gradients)  # type: ignore[no-untyped-call]
            for number, tensor in zip(wanting, cast(tuple[Tensor, ...], through), strict=True):
                tensors[number] = tensor
        return Received(rebuilt(coming.structure, tensors), entered, gradients)

    def settle(self) -> None:
        """Waits until all sent tensors have been received."""
        self.exchange.settle("take what was sent to them")

    def send_gradients(self, received: Received, chunk: int) -> None:
        """Sends gradients to the previous stage; zeros if the loss does not depend on its tensors."""
        rank, other = self.place(chunk, -1)
        found = received.gradients or [torch.zeros_like(tensor) for tensor in received.entered]
        for gradient in found:  # a parameter's may have the same memory, and the next backward pass adds to it
            self.exchange.post(gradient.clone(), rank, GRADIENT + TAGS * other)

    def begin_gradients(self, outputs: Sequence[Tensor], chunk: int) -> Coming:
        """Begins to receive the gradients of what a chunk sent to the next stage."""
        rank, _ = self.place(chunk, 1)
        found = [torch.empty(one.shape, dtype=one.dtype, device=self.device) for one in outputs]
        finish = [self.exchange.expect(one, rank, GRADIENT + TAGS * chunk) for one in found]
        return Coming(found, finish, "pass gradients back")

    def share_loss(self, values: NDArray[Any]) -> NDArray[Any]:
        """Broadcasts the last stage's values to all stages."""
        if self.rank != self.last:
            self.host.expect(torch.from_numpy(values), self.last, LOSS)("tell the loss")
            return values
        for rank in range(self.last):
            self.host.post(torch.from_numpy(values), rank, LOSS)
        return values

    def begin_receive(self, rank: int, tag: int, what: str) -> Coming:
        """Receives the description of a value that ``send`` sent, and begins to receive its tensors."""
        length = torch.empty(1, dtype=torch.int64, device="cpu")
        self.host.expect(length, rank, tag)(what)
        if int(length):
            text = torch.empty(int(length), dtype=torch.uint8, device="cpu")
            self.host.expect(text, rank, tag)(what)
            self.received_structures[rank, tag] = text.numpy().tobytes()
        structure = json.loads(self.received_structures[rank, tag])
        kinds = list(described_tensors(structure))
        tensors = [torch.empty(shape, dtype=DTYPES[dtype], device=self.device) for dtype, shape, _ in kinds]
        finish = [self.exchange.expect(one, rank, tag) for one in tensors]
        wanting = [number for number, (*_, wants) in enumerate(kinds) if wants]
        return Coming(tensors, finish, what, structure, wanting)


def wants_gradient(tensor: Tensor) -> bool:
    """Whether a tensor is part of a graph that backward may go through."""
    return tensor.requires_grad and torch.is_grad_enabled()


def described(value: Any, tensors: list[Tensor]) -> Any:
    """Describes a value, JSON-able; appends its tensors to the list, each once. Raises UserError for other types."""
    if isinstance(value, Tensor):
        known = next((number for number, one in enumerate(tensors) if one is value), None)
        if known is not None:
            return {"again": known}
        if value.layout is not torch.strided or str(value.dtype) not in DTYPES:
            raise UserError(
                f"a layer at the end of a stage passes on a tensor of {value.layout} and {value.dtype}",
                "pass on dense tensors of usual types",
            )
        tensors.append(value)
        return {"tensor": [str(value.dtype), list(value.shape), wants_gradient(value)]}
    if type(value) in (tuple, list):
        return {type(value).__name__: [described(one, tensors) for one in value]}
    if type(value) is dict and all(type(key) in PLAIN for key in value):
        return {"dict": [[key, described(one, tensors)] for key, one in value.items()]}
    if type(value) in PLAIN:
        return {"value": value}
    raise UserError(
        f"a layer at the end of a stage passes on {kind_of(value)}",
        "let layers pass on tensors, by themselves or in tuples, lists and dicts",
    )


def described_tensors(structure: Any) -> Iterator[tuple[str, list[int], bool]]:
    """Yields (dtype, shape, whether its gradient is wanted) of each tensor in a description."""
    ((kind, inner),) = structure.items()
    if kind == "tensor":
        yield inner
    elif kind not in ("value", "again"):
        for one in inner:
            yield from described_tensors(one[1] if kind == "dict" else one)


def rebuilt(structure: Any, tensors: Sequence[Tensor]) -> Any:
    """Rebuilds a value from its description and its tensors."""
    left = iter(tensors)

    def of(part: Any) -> Any:
        ((kind, inner),) = part.items()
        if kind == "tensor":
            return next(left)
        if kind == "again":
            return tensors[inner]
        if kind == "value":
            return inner
        if kind == "dict":
            return {key: of(one) for key, one in inner}
        parts = [of(one) for one in inner]
        return tuple(parts) if kind == "tuple" else parts

    return of(structure)
