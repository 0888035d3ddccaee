"""A reducer for an optimizer whose state is sharded: each rank gets summed gradients of the rows that it updates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from hpctrain.comm.group import Group
from hpctrain.comm.world import World
from hpctrain.config.sections import ReduceConfig
from hpctrain.errors import UserError
from hpctrain.parallel.sharded import Piece, Shares, Weighed, share_out
from hpctrain.parallel.sharded_exchange import ShardedExchange, open_sharded_exchange
from hpctrain.reduce.candidates import Candidate
from hpctrain.reduce.exchange_slots import LOSS, SLOTS, SQUARE, WEIGHT, WEIGHTED, ExchangeResult, read_slots
from hpctrain.reduce.layout import Layout, plan
from hpctrain.reduce.torch_allreduce import pin, unpin
from hpctrain.reduce.torch_gradients import FlatGradients, view_like
from hpctrain.reduce.torch_reducer import Number, common_kind

Pairs: TypeAlias = Sequence[tuple[str, Parameter]]


@dataclass(frozen=True)
class OwnRows:
    """Rows of a parameter that this rank updates."""

    piece: Piece
    parameter: Parameter
    """Views of the whole parameter: what the optimizer has in its place."""


@dataclass(frozen=True)
class Sharded:
    """The parameters of one optimizer, shared out among the ranks."""

    pairs: Pairs
    """All that want gradients, by name, whole."""
    layout: Layout
    """Of their gradients in the flat buffer."""
    shares: Shares
    rank: int
    """In the group that they are shared out in."""
    parts: tuple[OwnRows, ...]
    """This rank's own."""


def shard(pairs: Pairs, by_rows: set[int], updated: set[int], group: Group) -> Sharded:
    """Shares parameters out; touches no other rank.

    Args:
        pairs: parameters by name.
        by_rows: ids of those that may be cut between rows.
        updated: ids of those that an optimizer updates.
        group: the ranks.
    """
    layout = plan([parameter.numel() for _, parameter in pairs], None, SLOTS)
    weighed = [
        Weighed(
            rows=len(parameter) if id(parameter) in by_rows and has_rows(parameter) else 1,
            num_bytes=parameter.nbytes if id(parameter) in updated else 0,
        )
        for _, parameter in pairs
    ]
    shares = share_out(layout, weighed, group.size)
    own = [piece for piece in shares.pieces if piece.owner == group.rank]
    parts = tuple(OwnRows(piece, parameter_of(pairs[piece.parameter][1], piece)) for piece in own)
    return Sharded(pairs, layout, shares, group.rank, parts)


def has_rows(parameter: Tensor) -> bool:
    """Whether its rows lie one behind the other in the flat buffer, in which it has the strides of its own."""
    inner = math.prod(parameter.shape[1:])
    return parameter.ndim > 0 and torch.empty_like(parameter, device="meta").stride(0) == inner > 0


def parameter_of(whole: Parameter, piece: Piece) -> Parameter:
    """A parameter over the memory of a piece of another one, with what is attached to that."""
    part = Parameter(rows_of(whole.data, piece))
    part.__dict__.update(vars(whole))
    return part


def rows_of(tensor: Tensor, piece: Piece) -> Tensor:
    """A view of the rows of a piece."""
    return tensor if piece.rows == 1 else tensor[piece.begin : piece.end]


def places_of(parameters: Sequence[Parameter]) -> list[int]:
    """Addresses of their memory."""
    return [parameter.data_ptr() for parameter in parameters]


class ShardedReducer:
    """See reduce.torch_reducer.Reducer. ``grad`` of the parts is the sum, and that of whole parameters None."""

    def __init__(
        self,
        name: str,
        gradients: FlatGradients,
        exchange: ShardedExchange,
        sharded: Sharded,
        needs_norm: bool,
        optimizers: Sequence[Optimizer] = (),
    ) -> None:
        self.name = name
        self.optimizers = optimizers
        self.names = {id(parameter): name for name, parameter in sharded.pairs}
        self.flat_gradients = gradients
        self.sums = exchange
        self.needs_norm = needs_norm
        self.parts, self.places = sharded.parts, places_of(gradients.parameters)
        self.flat = gradients.flat
        self.host = torch.from_numpy(exchange.buffer)
        self.on_host = self.flat.device.type == "cpu"
        self.slots = self.host[sharded.layout.gradients :]
        self.ranges = sharded.shares.ranges
        self.own = self.ranges[sharded.rank]
        self.mine: list[Tensor] = [part.parameter for part in sharded.parts]
        self.sums_of_mine = [rows_of(gradients.views[part.piece.parameter], part.piece) for part in sharded.parts]
        """In the flat buffer."""
        self.copies = [torch.from_numpy(one) for one in exchange.leaving]
        """Where this rank leaves what it has updated."""
        leaving = self.copies if self.on_host else [self.flat]
        self.leaving = [[rows_of(self._view(part.piece, one), part.piece) for part in sharded.parts] for one in leaving]
        """The same by parts; on a GPU on its way there."""
        self.foreign = [piece for piece in sharded.shares.pieces if piece.owner != sharded.rank]
        self.theirs = self._theirs()
        """What other ranks update of the parameters here."""
        self.arriving = [rows_of(self._view(piece, self.flat), piece) for piece in self.foreign]
        """Where that comes from."""
        self.square = 0.0
        if not self.on_host:
            pin(self.host)
        gradients.attach()

    @property
    def last_backward(self) -> bool:
        return self.flat_gradients.last_backward

    @last_backward.setter
    def last_backward(self, value: bool) -> None:
        self.flat_gradients.last_backward = value

    def begin(self) -> None:
        self.flat_gradients.begin()
        for part in self.mine:
            part.grad = None

    def exchange(self, loss: Number = 0.0, weight: Number | None = None) -> ExchangeResult:
        self.flat_gradients.complete()
        self._require_parts()
        self._follow()
        if not self.on_host:
            self.host.copy_(self.flat)
        self.slots.zero_()
        self.slots[LOSS] = loss
        if weight is not None:
            self.slots[WEIGHT] = weight
            self.slots[WEIGHTED] = 1.0
        self.sums.scatter(self.needs_norm)
        if not self.on_host:
            self.flat[self.own].copy_(self.host[self.own])
        for part, summed in zip(self.mine, self.sums_of_mine, strict=True):
            part.grad = summed if part.dtype == summed.dtype else summed.to(part.dtype)
        self.flat_gradients.restart()
        told = self.sums.slots.tolist()
        self.square = told[SQUARE]
        return read_slots(told)

    def gradients(self) -> list[Tensor]:
        """Of this rank's parts."""
        if any(part.dtype != self.flat.dtype for part in self.mine):  # then ``grad`` is no view of the buffer
            return [part.grad for part in self.mine if part.grad is not None]
        return [self.flat[self.own]]

    def norm(self) -> float:
        return math.sqrt(self.square)

    def summed(self) -> Sequence[tuple[str, Tensor]]:
        names = self.flat_gradients.names
        return [(names[part.piece.parameter], part.parameter) for part in self.parts]

    def spread(self) -> bool:
        with torch.no_grad():
            for leaving in self.leaving:
                torch._foreach_copy_(leaving, self.mine)
            if not self.on_host:
                self.host[self.own].copy_(self.flat[self.own])
                for copy in self.copies:
                    if copy.data_ptr() != self.host.data_ptr():
                        copy[self.own] = self.host[self.own]
            self.sums.gather()
            if not self.on_host:
                for part in self.ranges:
                    if part != self.own:
                        self.flat[part].copy_(self.host[part])
            torch._foreach_copy_(self.theirs, self.arriving)
        return True

    def close(self) -> None:
        self.flat_gradients.detach()
        if not self.on_host:
            torch.cuda.synchronize(self.flat.device)
            unpin(self.host.data_ptr())
        self.sums.close()

    def _require_parts(self) -> None:
        """Raises UserError if an optimizer has got a whole parameter, which has no gradient here."""
        held = (one for each in self.optimizers for group in each.param_groups for one in group["params"])
        if (found := next((one for one in held if id(one) in self.names), None)) is not None:
            raise UserError(
                f"an optimizer was given {self.names[id(found)]} after the run had begun, when parallel.shard had "
                "shared out its parameters",
                "give it all parameters when the task is made (a schedule with a factor for each group lets some "
                "wait), or leave parallel.shard out",
            )

    def _follow(self) -> None:
        """Tasks may give a parameter other memory: ``parameter.data = parameter.data.clamp(-1, 1)``."""
        wholes = self.flat_gradients.parameters
        if (places := places_of(wholes)) != self.places:
            self.places = places
            for part in self.parts:
                part.parameter.data = rows_of(wholes[part.piece.parameter].data, part.piece)
            self.theirs = self._theirs()

    def _theirs(self) -> list[Tensor]:
        return [rows_of(self.flat_gradients.parameters[piece.parameter].data, piece) for piece in self.foreign]

    def _view(self, piece: Piece, flat: Tensor) -> Tensor:
        """A whole parameter, laid out in a buffer as its gradient is."""
        gradients = self.flat_gradients
        return view_like(gradients.parameters[piece.parameter], flat, gradients.layout.offsets[piece.parameter])


@dataclass(frozen=True)
class ShardedReducers:
    """The one reducer of parameters that are shared out; see reducer_choice.Reducers."""

    sharded: Sharded
    config: ReduceConfig
    needs_norm: bool = True
    """Whether an update has to know the norm of the gradient."""
    optimizers: Sequence[Optimizer] = ()
    """All of the task, which have this rank's parts."""
    sparse: Sequence[Parameter] = ()
    """No gradient stays sparse."""

    def possible(self, config: ReduceConfig, world: World) -> list[Candidate]:
        return [Candidate("mpi", "sharded")]

    def open(self, candidate: Candidate, group: Group) -> ShardedReducer:
        layout, ranges = self.sharded.layout, self.sharded.shares.ranges
        dtype, device = common_kind(self.sharded.pairs)
        host_dtype = torch.empty(0, dtype=dtype).numpy().dtype
        exchange = open_sharded_exchange(group, layout.length, layout.gradients, host_dtype, ranges)
        host = torch.from_numpy(exchange.buffer)
        flat = host if device.type == "cpu" else torch.zeros_like(host, device=device)
        gradients = FlatGradients(self.sharded.pairs, flat, layout, lambda bucket: None, self.config.sparse)
        return ShardedReducer(candidate.name, gradients, exchange, self.sharded, self.needs_norm, self.optimizers)
