"""Shards a Keras model's variables over ranks. Its reducer gives each rank the summed gradients of its rows, then
gathers all updated variables."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hpctrain.backends.tensorflow.reduce.reducer import Pieces, Told, tell
from hpctrain.comm.group import Group
from hpctrain.comm.world import World
from hpctrain.config.sections import ReduceConfig
from hpctrain.parallel.sharded import RowRange, ShardedParameter, Shares, share_out
from hpctrain.parallel.sharded_exchange import ShardedExchange, open_sharded_exchange
from hpctrain.reduce.candidates import Candidate
from hpctrain.reduce.host_allreduce import views
from hpctrain.reduce.layout import Layout

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


def stand_in(whole: keras.Variable, value: Any) -> keras.Variable:
    """Makes a variable with another value, and perhaps shape, that an optimizer treats like the whole one."""
    *scopes, name = whole.path.split("/")
    with contextlib.ExitStack() as stack:
        for number, scope in enumerate(scopes):
            stack.enter_context(keras.name_scope(scope, override_parent=None if number else ""))
        part = keras.Variable(tf.cast(value, whole.dtype), dtype=whole.dtype, name=name)
    part.constraint = whole.constraint
    part.overwrite_with_gradient = whole.overwrite_with_gradient
    return part


def build_on(
    optimizer: keras.optimizers.Optimizer, wholes: Sequence[keras.Variable], parts: Sequence[keras.Variable]
) -> None:
    """Builds an optimizer on parts instead of whole variables, keeping exclusions from weight decay.

    Args:
        optimizer: the optimizer, not built.
        wholes: whole variables, some perhaps excluded from weight decay.
        parts: replacements in the same order; further ones may follow.
    """
    known = vars(optimizer)
    if excluded := known.get("_exclude_from_weight_decay"):
        pattern = known.get("_exclude_from_weight_decay_pattern")
        pairs = zip(wholes, parts, strict=False)
        left_out = [part for whole, part in pairs if optimizer._var_key(whole) in excluded]
        optimizer.exclude_from_weight_decay(left_out, None if pattern is None else [pattern.pattern])
    optimizer.build(list(parts))


def slots_of(optimizer: keras.optimizers.Optimizer, weights: Sequence[str]) -> list[tuple[keras.Variable, str, str]]:
    """(variable, slot, weight) of a built optimizer; (variable, name, "") for variables of no weight.

    Keras prefixes slot names with the path of the weight. Where all have the same name (Adafactor), the slot is the
    attribute in which the optimizer keeps one variable per weight.

    Args:
        optimizer: the built optimizer.
        weights: flat paths of its weights.
    """
    named = [(one, *slot_of(one.path, weights)) for one in optimizer.variables]
    count = Counter(slot for _, slot, weight in named if not weight)
    updated = optimizer._trainable_variables
    kept = {
        id(one): (name.strip("_"), flat(variable.path))
        for name, value in vars(optimizer).items()
        if isinstance(value, list) and len(value) == len(updated)
        for one, variable in zip(value, updated, strict=True)
        if isinstance(one, keras.Variable)
    }
    return [
        (one, *kept[id(one)]) if not weight and count[slot] > 1 and id(one) in kept else (one, slot, weight)
        for one, slot, weight in named
    ]


def slot_of(path: str, weights: Sequence[str]) -> tuple[str, str]:
    """Parses a path such as ``adam/model_dense_kernel_momentum`` into (slot, weight)."""
    own = path.split("/", 1)[-1]
    weight = max((each for each in weights if own.startswith(f"{each}_")), key=len, default="")
    return (own[len(weight) + 1 :], weight) if weight else (own, "")


def flat(path: str) -> str:
    """A weight's path in the form that optimizers use in slot names."""
    return path.replace("/", "_")


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

    def sum(self, pieces: Sequence[tf.Tensor], before: Told = None, after: Told = None) -> list[tf.Tensor]:
        return [tf.raw_ops.DeepCopy(x=total) for total in self.borrow(pieces, before, after)]

    def borrow(self, pieces: Sequence[tf.Tensor], before: Told = None, after: Told = None) -> list[tf.Tensor]:
        def scattered(*arrays: NDArray[Any]) -> list[NDArray[Any]]:
            tell(before)
            for view, array in zip(self.filled, arrays, strict=True):
                np.copyto(view, array)
            self.exchange.scatter(needs_norm=True)
            tell(after)
            return [*self.sums, self.exchange.slots]

        dtype = self.sharded.pieces.dtype
        totals = tf.numpy_function(scattered, pieces, [dtype] * (len(self.sums) + 1))
        for total, shape in zip(totals, [*(one.shape for one in self.sums), pieces[-1].shape], strict=True):
            total.set_shape(shape)
        return list(totals)

    def spread(self, updated: Sequence[tf.Tensor], before: Told = None, after: Told = None) -> list[tf.Tensor]:
        """Gathers all updated variables from all ranks; works inside and outside of TensorFlow functions.

        Args:
            updated: this rank's updated rows.
            before: called when they are complete.
            after: called when those of all ranks have arrived.
        """

        def gathered(*arrays: NDArray[Any]) -> list[NDArray[Any]]:
            tell(before)
            for leaving in self.leaving:
                for view, array in zip(leaving, arrays, strict=True):
                    np.copyto(view, array)
            self.exchange.gather()
            tell(after)
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
