"""A reducer for an optimizer whose state is sharded: each rank gets summed gradients of the rows that it updates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter

from hpctrain.comm.group import Group
from hpctrain.comm.world import World
from hpctrain.config.sections import ReduceConfig
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


class ShardedReducer:
    """See reduce.torch_reducer.Reducer. ``grad`` of the parts is the sum, and that of whole parameters None.

    Parameters travel back through the buffer of their gradients, which nobody needs by then.
    """

    def __init__(self, name: str, gradients: FlatGradients, exchange: ShardedExchange, sharded: Sharded) -> None:
        self.name = name
        self.flat_gradients = gradients
        self.sums = exchange
        self.flat = gradients.flat
        self.host = torch.from_numpy(exchange.buffer)
        self.on_host = self.flat.device.type == "cpu"
        self.slots = self.host[sharded.layout.gradients :]
        self.ranges = sharded.shares.ranges
        self.mine: list[Tensor] = [part.parameter for part in sharded.parts]
        self.places = [rows_of(gradients.views[part.piece.parameter], part.piece) for part in sharded.parts]
        """Of this rank's parts, in the flat buffer."""
        self.own = self.ranges[sharded.rank]
        foreign = [piece for piece in sharded.shares.pieces if piece.owner != sharded.rank]
        wholes = gradients.parameters
        self.theirs = [rows_of(wholes[piece.parameter].data, piece) for piece in foreign]
        """What other ranks update of the parameters here."""
        self.arriving = [self._arriving(piece) for piece in foreign]
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
        if not self.on_host:
            self.host.copy_(self.flat)
        self.slots.zero_()
        self.slots[LOSS] = loss
        if weight is not None:
            self.slots[WEIGHT] = weight
            self.slots[WEIGHTED] = 1.0
        self.sums.scatter()
        if not self.on_host:
            self.flat[self.own].copy_(self.host[self.own], non_blocking=True)
        for part, place in zip(self.mine, self.places, strict=True):
            part.grad = place if part.dtype == place.dtype else place.to(part.dtype)
        self.flat_gradients.restart()
        told = self.slots.tolist()
        self.square = told[SQUARE]
        return read_slots(told)

    def gradients(self) -> list[Tensor]:
        """Of this rank's parts."""
        if any(part.dtype != self.flat.dtype for part in self.mine):  # then ``grad`` is no view of the buffer
            return [part.grad for part in self.mine if part.grad is not None]
        return [self.flat[self.own]]

    def norm(self) -> float:
        return math.sqrt(self.square)

    def spread(self) -> bool:
        with torch.no_grad():
            torch._foreach_copy_(self.places, self.mine)
            if not self.on_host:
                self.host[self.own].copy_(self.flat[self.own])
            self.sums.gather()
            if not self.on_host:
                for part, source in zip(self.ranges, self.sums.sources, strict=True):
                    if part != self.own:
                        self.flat[part].copy_(torch.from_numpy(source[part]))
            torch._foreach_copy_(self.theirs, self.arriving)
            self.sums.release()
        return True

    def close(self) -> None:
        self.flat_gradients.detach()
        if not self.on_host:
            torch.cuda.synchronize(self.flat.device)
            unpin(self.host.data_ptr())
        self.sums.close()

    def _arriving(self, piece: Piece) -> Tensor:
        """Where a piece of another rank can be read after ``gather``: on a GPU it is brought to the flat buffer."""
        gradients = self.flat_gradients
        if not self.on_host:
            return rows_of(gradients.views[piece.parameter], piece)
        source = torch.from_numpy(self.sums.sources[piece.owner])
        offset = gradients.layout.offsets[piece.parameter]
        return rows_of(view_like(gradients.parameters[piece.parameter], source, offset), piece)


@dataclass(frozen=True)
class ShardedReducers:
    """The one reducer of parameters that are shared out; see reducer_choice.Reducers."""

    sharded: Sharded
    config: ReduceConfig
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
        return ShardedReducer(candidate.name, gradients, exchange, self.sharded)
