"""``parallel.shard: optimizer``: each rank's optimizer updates some rows of the weights; all ranks then gather them."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hpctrain.backends.named_state import require_same_model
from hpctrain.backends.tensorflow.reducer import Callback, Pieces, broadcast, notify
from hpctrain.backends.tensorflow.sparse_sums import Gradients
from hpctrain.backends.tensorflow.state.tensors import OwnSlots, VariableTensor, flat
from hpctrain.backends.tensorflow.steps.passes import Applying
from hpctrain.backends.tensorflow.strategies.probe import build_on, stand_in, try_optimizer
from hpctrain.backends.tensorflow.strategies.strategy import Opening, Prepared, Strategy
from hpctrain.comm.group import Group
from hpctrain.comm.world import World
from hpctrain.config.combinations import Feature, Uses, refuse, used
from hpctrain.config.sections import ReduceConfig
from hpctrain.parallel.sharded import RowRange, ShardedParameter, Shares, share_out
from hpctrain.parallel.sharded_exchange import ShardedExchange, open_sharded_exchange
from hpctrain.reduce.candidates import Candidate
from hpctrain.reduce.host_allreduce import views
from hpctrain.reduce.layout import Layout
from hpctrain.train.clock import Phase, StepClock
from hpctrain.train.state import Cut

NOTHING = "hpctrain_nothing"
"""Name of the placeholder that an optimizer updates on a rank without rows, so that it counts its steps."""


@dataclass(frozen=True)
class OwnRows:
    """Rows of a variable that this rank updates."""

    piece: RowRange
    whole: keras.Variable
    part: keras.Variable
    """Variable of the same name that the optimizer updates instead; set from the whole one before each update."""


@dataclass(frozen=True)
class Sharded:
    """The variables of a model, sharded over the ranks."""

    pieces: Pieces
    """Pieces of their gradients."""
    shares: Shares
    rank: int
    """This rank's number in the group over which they are sharded."""
    rows: tuple[OwnRows, ...]
    """Rows that this rank updates."""
    updated: tuple[keras.Variable, ...]
    """Variables of the optimizer: the parts of ``rows``, or a placeholder if there are none."""


def shard(variables: Sequence[keras.Variable], pieces: Pieces, by_rows: Sequence[bool], group: Group) -> Sharded:
    """Partitions variables over the ranks. Not collective.

    Args:
        variables: the trained variables, in the order of the pieces.
        pieces: pieces of their gradients.
        by_rows: for each, whether it may be cut between rows.
        group: the ranks.
    """
    weighed = [
        ShardedParameter(rows=one.shape[0] if cuttable and min(one.shape, default=0) else 1, num_bytes=size_of(one))
        for one, cuttable in zip(variables, by_rows, strict=True)
    ]
    shares = share_out(layout_of(pieces), weighed, group.size)
    own = [piece for piece in shares.pieces if piece.owner == group.rank]
    wholes = [variables[piece.parameter] for piece in own]
    rows = tuple(
        OwnRows(piece, whole, stand_in(whole, piece.of(whole.value))) for piece, whole in zip(own, wholes, strict=True)
    )
    parts = tuple(each.part for each in rows)
    return Sharded(pieces, shares, group.rank, rows, parts or (keras.Variable(np.zeros(1, "float32"), name=NOTHING),))


def size_of(variable: keras.Variable) -> int:
    """Size of a variable in bytes."""
    elements: int = math.prod(variable.shape)
    return elements * int(tf.as_dtype(variable.dtype).size)


def layout_of(pieces: Pieces) -> Layout:
    """Layout by variable of the pieces' flat buffer; a piece may hold several variables."""
    known = pieces.layout
    offsets = [0] * len(pieces.variable_shapes)
    sizes = [math.prod(shape) for shape in pieces.variable_shapes]
    for offset, members in zip(known.offsets, pieces.groups, strict=True):
        for number, index in enumerate(members):
            offsets[index] = offset + number * sizes[index]
    return replace(known, offsets=tuple(offsets), sizes=tuple(sizes))


class ShardedReducer:
    """See reducer.Reducer. The sums are those of this rank's rows, then the slots."""

    lends = meets = True

    def __init__(self, name: str, exchange: ShardedExchange, sharded: Sharded) -> None:
        self.name = name
        self.exchange = exchange
        self.sharded = sharded
        layout, pieces = sharded.pieces.layout, sharded.pieces
        self.arrived = views(exchange.buffer, layout, pieces.shapes)
        self.filled = [*self.arrived, exchange.buffer[layout.gradients :]]
        self.sums = own_rows(sharded, exchange.buffer)
        places = {one.ctypes.data: one for one in (exchange.buffer, *exchange.leaving)}
        self.leaving = [own_rows(sharded, one) for one in places.values()]
        """This rank's rows in each buffer that they must be written to."""
        self.close = exchange.close

    def sum(self, pieces: Sequence[tf.Tensor], before: Callback = None, after: Callback = None) -> list[tf.Tensor]:
        return [tf.raw_ops.DeepCopy(x=total) for total in self.borrow(pieces, before, after)]

    def borrow(self, pieces: Sequence[tf.Tensor], before: Callback = None, after: Callback = None) -> list[tf.Tensor]:
        def scattered(*arrays: NDArray[Any]) -> list[NDArray[Any]]:
            notify(before)
            for view, array in zip(self.filled, arrays, strict=True):
                np.copyto(view, array)
            self.exchange.scatter(needs_norm=True)
            notify(after)
            return [*self.sums, self.exchange.slots]

        dtype = self.sharded.pieces.dtype
        totals = tf.numpy_function(scattered, pieces, [dtype] * (len(self.sums) + 1))
        for total, shape in zip(totals, [*(one.shape for one in self.sums), pieces[-1].shape], strict=True):
            total.set_shape(shape)
        return list(totals)

    def spread(self, updated: Sequence[tf.Tensor], before: Callback = None, after: Callback = None) -> list[tf.Tensor]:
        """Gathers all updated variables from all ranks; works inside and outside of TensorFlow functions.

        Args:
            updated: this rank's updated rows.
            before: called when they are complete.
            after: called when those of all ranks have arrived.
        """

        def gathered(*arrays: NDArray[Any]) -> list[NDArray[Any]]:
            notify(before)
            for leaving in self.leaving:
                for view, array in zip(leaving, arrays, strict=True):
                    np.copyto(view, array)
            self.exchange.gather()
            notify(after)
            return self.arrived

        pieces = self.sharded.pieces
        back = tf.numpy_function(
            gathered, [tf.cast(one, pieces.dtype) for one in updated], [pieces.dtype] * len(pieces.shapes)
        )
        for piece, shape in zip(back, pieces.shapes, strict=True):
            piece.set_shape(shape)
        return pieces.unpack([tf.raw_ops.DeepCopy(x=piece) for piece in back])


def own_rows(sharded: Sharded, flat_buffer: NDArray[Any]) -> list[NDArray[Any]]:
    """Views of the rows that this rank updates, in a flat buffer of all variables."""
    every = views(flat_buffer, layout_of(sharded.pieces), sharded.pieces.variable_shapes)
    return [one.piece.of(every[one.piece.parameter]) for one in sharded.rows]


@dataclass(frozen=True)
class ShardedReducers:
    """The one reducer of sharded variables; see reducer_choice.Reducers."""

    sharded: Sharded

    def possible(self, config: ReduceConfig, world: World) -> list[Candidate]:
        return [Candidate("mpi", "sharded")]

    def open(self, candidate: Candidate, group: Group) -> ShardedReducer:
        pieces = self.sharded.pieces
        layout, dtype = pieces.layout, pieces.dtype.as_numpy_dtype
        ranges = self.sharded.shares.ranges
        exchange = open_sharded_exchange(group, layout.length, layout.gradients, dtype, ranges)
        return ShardedReducer(candidate.name, exchange, self.sharded)


def planned(opening: Opening) -> Strategy | None:
    """Returns the strategy if ``parallel.shard`` is set and there are several ranks."""
    is_used = Feature.SHARD in opening.features and opening.world.data.size > 1
    return functools.partial(shard_weights, opening) if is_used else None


def shard_weights(opening: Opening) -> Prepared:
    """Builds the optimizer on the rows that this rank updates. Collective."""
    task, data = opening.task, opening.world.data
    variables = opening.variables
    packing = Gradients(variables, [], data)
    sharded, slots = shard_optimizer(task.optimizer, variables, packing.pieces, data, opening.features)
    reducers = ShardedReducers(sharded)
    reducer = opening.choice.known(reducers)
    assert isinstance(reducer, ShardedReducer), "there is one, which is known"
    open_update = functools.partial(ShardedUpdate, task.optimizer, variables, reducer, opening.clock)
    parts = [one.value for one in sharded.updated]
    return Prepared(packing, reducers, reducer, open_update, slots, parts, functools.partial(require_rows, opening))


def require_rows(opening: Opening, tensors: Sequence[VariableTensor]) -> None:
    """Raises UserError if the optimizer holds state that cannot be placed in rows."""
    if any(tensor.name.startswith("held/optimizer/") for tensor in tensors):
        kind = type(opening.task.optimizer).__name__
        refuse({**opening.features, Feature.OWN_OPTIMIZER_STATE: kind})


def shard_optimizer(
    optimizer: keras.optimizers.Optimizer,
    variables: Sequence[keras.Variable],
    pieces: Pieces,
    group: Group,
    features: Uses,
) -> tuple[Sharded, OwnSlots]:
    """Shards variables and builds the optimizer on this rank's rows. Collective.

    Args:
        optimizer: the task's optimizer, not built.
        variables: the variables that it updates.
        pieces: pieces of their gradients.
        group: the ranks.
        features: features of the run.

    Returns:
        The sharded variables, and the place of the optimizer's state within that of whole weights.

    Raises:
        UserError: the ranks' models differ, or the optimizer cannot be sharded.
    """
    described = [(one.path, tuple(one.shape), one.dtype) for one in variables]
    require_same_model(group, described, "variables")
    broadcast(group, [one.value for one in variables], "receive the model")  # state may start from the weights
    verdict = try_optimizer(optimizer, variables)
    everywhere = group.allgather((verdict.is_alone, verdict.by_rows), "compare how optimizer state can be split")
    coupled = not all(is_alone for is_alone, _ in everywhere)
    refuse(dict(features) | used({Feature.NON_ELEMENTWISE: coupled and type(optimizer).__name__}))
    by_rows = [all(one) for one in zip(*(by_rows for _, by_rows in everywhere), strict=True)]
    sharded = shard(variables, pieces, by_rows, group)
    build_on(optimizer, [each.whole for each in sharded.rows], sharded.updated)
    cuts = {}
    for each in sharded.rows:
        begin = 0 if each.piece.rows == 1 else each.piece.begin
        shape = tuple(each.whole.shape)
        cuts[flat(each.whole.path)] = Cut(shape, (begin, *[0] * len(shape))[: len(shape)])
    parts = {flat(each.whole.path): tuple(each.part.shape) for each in sharded.rows}
    return sharded, OwnSlots(cuts, parts, verdict.common, flat(NOTHING))


@dataclass(eq=False)
class ShardedUpdate:
    """See passes.WeightUpdate. ``run`` gets the sums of this rank's rows, updates them and gathers all ranks' rows."""

    optimizer: keras.optimizers.Optimizer
    """Built on this rank's rows."""
    variables: Sequence[keras.Variable]
    """All trained variables of the model."""
    reducer: ShardedReducer
    clock: StepClock
    """Marks the times of the update and the gather."""
    applying: Applying

    def __post_init__(self) -> None:
        self.sharded = self.reducer.sharded
        self.updated = lambda: self.clock.mark(Phase.OPTIMIZER)
        self.arrived = lambda: self.clock.mark(Phase.EXCHANGE)
        self.apply = tf.function(self._apply, jit_compile=self.applying.train.compile or None, autograph=False)

    def run(self, rows: Sequence[tf.Tensor], sums: Sequence[tf.Tensor]) -> tf.Tensor:
        """See WeightUpdate; ``rows`` is empty."""
        with tf.control_dependencies([self.apply(sums)]):
            updated = [each.part.value.read_value() for each in self.sharded.rows]
            everything = self.reducer.spread(updated, self.updated, self.arrived)
        for variable, value in zip(self.variables, everything, strict=True):
            variable.assign(tf.cast(value, variable.dtype))
        self.applying.follow(self.variables)
        with tf.control_dependencies(everything):
            return tf.constant(True)

    def _apply(self, sums: Sequence[tf.Tensor]) -> tf.Tensor:
        for each in self.sharded.rows:  # weights may have been loaded or changed by the task
            each.part.assign(each.piece.of(each.whole.value))
        updated = list(self.sharded.updated)
        given = sums or [tf.zeros_like(one.value) for one in updated]
        self.applying.apply(self.optimizer.apply, given, updated)
        return tf.convert_to_tensor(self.optimizer.iterations) >= 0
