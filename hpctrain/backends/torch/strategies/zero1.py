"""``parallel.shard: optimizer``: each rank's optimizer updates some rows of parameters, and sends them to all ranks.

Its reducer gives each rank the summed gradients of the rows that it updates.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter

from hpctrain.backends.torch.process_groups import by_group, peers_of, word_of
from hpctrain.backends.torch.reduce.gradients import FlatGradients, as_real, view_like
from hpctrain.backends.torch.reduce.reducer import ByFlatGradients, Reducer
from hpctrain.backends.torch.reduce.sharded import (
    GroupSharded,
    HostSharded,
    StagedSharded,
    TensorSharded,
)
from hpctrain.backends.torch.reduce.sharded_exchange import open_sharded_exchange
from hpctrain.backends.torch.reduce.slots import Number
from hpctrain.backends.torch.reduce.torch_reducers import bucket_sizes, common_kind
from hpctrain.backends.torch.state.optimizer import Slots
from hpctrain.backends.torch.steps.updates import FixedReducerFactory
from hpctrain.backends.torch.strategies.estimated import Estimated
from hpctrain.backends.torch.strategies.memory_estimate import MemoryEstimate
from hpctrain.backends.torch.strategies.parameter_traits import (
    OwnRows,
    ParameterTraits,
    parameter_of,
    shard_optimizers,
)
from hpctrain.backends.torch.strategies.partition import Slices
from hpctrain.backends.torch.strategies.row_shares import RowRange, RowShares, ShardedParameter, share_out
from hpctrain.backends.torch.strategies.strategy import (
    ParameterUpdates,
    PreparedModel,
    Strategy,
    StrategyContext,
    needs_norm,
)
from hpctrain.comm.group import Group
from hpctrain.config.features import Feature
from hpctrain.config.sections import ReduceConfig
from hpctrain.reduce.candidates import Candidate
from hpctrain.reduce.flat_layout import SLOTS, SQUARE, ExchangeResult, Layout, plan, read_slots

Pairs: TypeAlias = Sequence[tuple[str, Parameter]]


@dataclass(frozen=True)
class OptimizerShards:
    """The parameters of one optimizer, sharded over the ranks."""

    pairs: Pairs
    """All parameters that require gradients, by name, whole."""
    layout: Layout
    """Layout of their gradients in the flat buffer."""
    shares: RowShares
    rank: int
    """This rank, in the group over which they are sharded."""
    parts: tuple[OwnRows, ...]
    """The parts that this rank updates."""


def shard(pairs: Pairs, traits: ParameterTraits, group: Group) -> OptimizerShards:
    """Shards parameters over the ranks of a group. Does not communicate.

    Args:
        pairs: parameters by name.
        traits: which of them optimizers update, and which may be split between rows.
        group: the ranks.
    """
    layout, shares = shared_out(pairs, traits, group.size)
    own = [piece for piece in shares.pieces if piece.owner == group.rank]
    parts = tuple(OwnRows(piece, parameter_of(pairs[piece.parameter][1], piece)) for piece in own)
    return OptimizerShards(pairs, layout, shares, group.rank, parts)


def shared_out(pairs: Pairs, traits: ParameterTraits, ranks: int) -> tuple[Layout, RowShares]:
    """The layout of parameters in the flat buffer, and each rank's share of it; see ``shard``."""
    layout = plan([as_real(parameter).numel() for _, parameter in pairs], None, SLOTS)
    weighed = []
    for _, parameter in pairs:
        rows = len(parameter) if id(parameter) in traits.by_rows and has_rows(parameter) else 1
        weighed.append(ShardedParameter(rows, parameter.nbytes if id(parameter) in traits.updated else 0))
    return layout, share_out(layout, weighed, ranks)


def has_rows(parameter: Tensor) -> bool:
    """Whether its rows are consecutive in the flat buffer, where it keeps its strides."""
    inner = math.prod(parameter.shape[1:])
    return parameter.ndim > 0 and torch.empty_like(parameter, device="meta").stride(0) == inner > 0


class ShardedReducer(ByFlatGradients, Reducer):
    """A reducer that sums gradients where they are needed, and sends updated rows; see reduce.reducer.Reducer.

    ``grad`` of this rank's parts is the sum; whole parameters have None.
    """

    def __init__(
        self,
        name: str,
        gradients: FlatGradients,
        exchange: TensorSharded,
        sharded: OptimizerShards,
        needs_norm: bool,
    ) -> None:
        own = exchange.flat[sharded.shares.ranges[sharded.rank]]
        self.sharded, self.own = sharded, own
        self.parameters = [parameter for _, parameter in sharded.pairs]
        self.mine: list[Tensor] = [part.parameter for part in sharded.parts]
        layout = sharded.layout
        start = sharded.shares.ranges[sharded.rank].start
        self.sums_of_mine = [
            view_like(part.parameter, own, layout.offsets[index] - start + begin * (layout.sizes[index] // rows))
            for part in sharded.parts
            for index, begin, rows in [(part.piece.parameter, part.piece.begin, part.piece.rows)]
        ]
        self.square = 0.0
        self.places = self._places()
        self.name = name
        self.flat_gradients = gradients
        self.sums = exchange
        self.needs_norm = needs_norm
        self.leaving = [
            [part.piece.of(self._view(part.piece, one)) for part in sharded.parts] for one in exchange.leaving
        ]
        """Where this rank writes what it has updated, one view per part."""
        self.foreign = [piece for piece in sharded.shares.pieces if piece.owner != sharded.rank]
        self.theirs = self._theirs()
        """What other ranks update of the parameters here."""
        self.arriving = [piece.of(self._view(piece, exchange.flat)) for piece in self.foreign]
        """Where the values of ``theirs`` arrive."""
        gradients.attach()

    def begin(self) -> None:
        self.flat_gradients.begin()
        for part in self.mine:
            part.grad = None

    def exchange(self, loss: Number = 0.0, weight: Number | None = None) -> ExchangeResult:
        self.flat_gradients.complete()
        if self._follow():
            self.theirs = self._theirs()
        slots = self.sums.scatter(loss, weight, self.needs_norm)
        self._give()
        self.flat_gradients.restart()
        self.square = slots[SQUARE]
        return read_slots(slots)

    def gather_parameters(self) -> bool:
        with torch.no_grad():
            for leaving in self.leaving:
                copy_all(leaving, self.mine)
            self.sums.gather()
            copy_all(self.theirs, self.arriving)
        return True

    def close(self) -> None:
        self.flat_gradients.detach()
        self.sums.close()

    def gradients(self) -> list[Tensor]:
        """Gradients of this rank's parts."""
        if any(part.dtype != self.own.dtype for part in self.mine):  # then ``grad`` is not a view of the buffer
            return [part.grad for part in self.mine if part.grad is not None]
        return [self.own]

    def norm(self) -> float:
        return math.sqrt(self.square)

    def summed(self) -> Sequence[tuple[str, Tensor]]:
        return [(self.sharded.pairs[part.piece.parameter][0], part.parameter) for part in self.sharded.parts]

    def _give(self) -> None:
        """Sets ``grad`` of this rank's parts to the sums, or to None for frozen parameters."""
        for part, mine, summed in zip(self.sharded.parts, self.mine, self.sums_of_mine, strict=True):
            grad = summed if mine.dtype == summed.dtype else summed.to(mine.dtype)
            mine.grad = grad if self.parameters[part.piece.parameter].requires_grad else None

    def _follow(self) -> bool:
        """Follows parameters that the task has moved (``parameter.data = ...``); returns whether there were any."""
        if (places := self._places()) == self.places:
            return False
        self.places = places
        for part in self.sharded.parts:
            part.parameter.data = part.piece.of(self.parameters[part.piece.parameter].data)
        return True

    def _places(self) -> list[int]:
        """Memory addresses of the parameters."""
        return [parameter.data_ptr() for parameter in self.parameters]

    def _theirs(self) -> list[Tensor]:
        return [piece.of(self.parameters[piece.parameter].data) for piece in self.foreign]

    def _view(self, piece: RowRange, flat: Tensor) -> Tensor:
        """A view with the parameter's shape of its place in a flat buffer."""
        return view_like(self.parameters[piece.parameter], flat, self.sharded.layout.offsets[piece.parameter])


def copy_all(into: list[Tensor], values: list[Tensor]) -> None:
    """Copies each tensor; a rank may update none, or all."""
    if into:
        torch._foreach_copy_(into, values)


def open_sharded(
    sharded: OptimizerShards, config: ReduceConfig, needs_norm: bool, candidate: Candidate, group: Group
) -> ShardedReducer:
    """Opens the reducer of sharded parameters; ``needs_norm`` says whether updates need the gradient norm."""
    layout, ranges = sharded.layout, sharded.shares.ranges
    dtype, device = common_kind(sharded.pairs)
    exchange: TensorSharded
    if candidate.kind != "mpi":
        most, ends = bucket_sizes(config, replace(candidate, way="overlap"), dtype, device)
        layout = replace(layout, buckets=plan(layout.sizes, most, SLOTS, ends).buckets)
        exchange = GroupSharded(peers_of(group, device), layout, ranges, dtype, device)
    else:
        host_dtype = torch.empty(0, dtype=dtype, device="cpu").numpy().dtype
        host = open_sharded_exchange(group, layout.length, layout.gradients, host_dtype, ranges)
        if device.type == "cpu":
            exchange = HostSharded(host, layout)
        else:
            exchange = StagedSharded(host, layout, ranges[group.rank], device)

    def ready(number: int) -> None:
        bucket = layout.buckets[number]
        exchange.start(bucket.begin, min(bucket.end, layout.gradients))

    gradients = FlatGradients(sharded.pairs, exchange.flat, layout, ready, config.sparse)
    return ShardedReducer(candidate.name, gradients, exchange, sharded, needs_norm)


def planned(context: StrategyContext) -> Strategy | None:
    """The strategy, if the run shards optimizers. Raises UserError if an optimizer cannot be sharded."""
    return functools.partial(shard_rows, context, context.traits) if context.divides(Feature.SHARD) else None


def shard_rows(context: StrategyContext, traits: ParameterTraits, prepared: PreparedModel) -> PreparedModel:
    """Gives each optimizer the rows that this rank updates, of the ranks that have the same part of the model.
    Collective."""
    partition = prepared.partition
    names = context.names()
    shares = context.shares()
    world = context.world
    partition.update_among(world.data)
    of = {name: shard(share.pairs, traits, world.data) for name, share in shares.items()}
    mine: dict[int, OwnRows | None] = {id(parameter): None for each in of.values() for _, parameter in each.pairs}
    slices: dict[int, Slices] = {}
    own_names: dict[int, str] = {}
    for sharded in of.values():
        for rows in sharded.parts:
            whole = sharded.pairs[rows.piece.parameter][1]
            mine[id(whole)] = rows
            name = names[id(whole)]
            begin = rows.piece.begin
            end = rows.piece.end
            if rows.piece.rows == 1:  # it has one owner
                begin, end = 0, len(whole) if whole.ndim else 1
            slices[id(rows.parameter)] = partition.rows(name, tuple(whole.shape), begin, end)
            own_names[id(rows.parameter)] = name
    shard_optimizers(context.optimizers, mine)
    config, norm = context.config.reduce, needs_norm(context, partition)
    device = context.compute.device
    kind = word_of(device) if by_group(config.kind, world, device) else "mpi"
    reducers = {
        name: FixedReducerFactory(Candidate(kind, "sharded"), functools.partial(open_sharded, own, config, norm))
        for name, own in of.items()
    }
    updates = ParameterUpdates(shares, {**names, **own_names}, Slots(slices), reducers)
    return replace(prepared, updates=updates)


def estimate(model: Estimated) -> MemoryEstimate:
    """See estimated.Estimate. The largest rank updates the largest fraction of bytes."""
    held, traits = [0.0] * model.data, model.traits
    for share in model.shares.values():
        for piece in shared_out(share.pairs, traits, model.data)[1].pieces:
            parameter = share.pairs[piece.parameter][1]
            if id(parameter) in traits.updated:
                held[piece.owner] += (piece.end - piece.begin) / piece.rows * parameter.nbytes
    return model.whole.scaled(optimizer=max(held) / max(sum(held), 1))
