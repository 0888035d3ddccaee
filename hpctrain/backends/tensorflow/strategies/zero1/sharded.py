"""Variables of a Keras model whose optimizer's state is sharded, and a reducer: each rank gets summed gradients of the
rows that it updates, and in the end all variables."""

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
"""Name of what an optimizer updates where a rank has no rows, so that it counts its steps."""


@dataclass(frozen=True)
class OwnRows:
    """Rows of a variable that this rank updates."""

    piece: RowRange
    whole: keras.Variable
    part: keras.Variable
    """What the optimizer has in its place: of the same name. It gets the values of the whole one before each update."""


@dataclass(frozen=True)
class Sharded:
    """The variables of a model, sharded over the ranks."""

    pieces: Pieces
    """As which their gradients travel."""
    shares: Shares
    rank: int
    """In the group over which they are sharded."""
    rows: tuple[OwnRows, ...]
    """This rank's own."""
    updated: tuple[keras.Variable, ...]
    """What the optimizer has: the parts of ``rows`` or, if there are none, a number that stands for nothing."""


def shard(variables: Sequence[keras.Variable], pieces: Pieces, by_rows: Sequence[bool], group: Group) -> Sharded:
    """Shares variables out; touches no other rank.

    Args:
        variables: those to train, in the order of the pieces.
        pieces: of their gradients.
        by_rows: of each, whether it may be cut between rows.
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
    """In bytes."""
    elements: int = math.prod(variable.shape)
    return elements * int(tf.as_dtype(variable.dtype).size)


def layout_of(pieces: Pieces) -> Layout:
    """Of each variable's gradient in the flat buffer of the pieces, some of which hold several."""
    known = pieces.layout
    offsets = [0] * len(pieces.variable_shapes)
    sizes = [math.prod(shape) for shape in pieces.variable_shapes]
    for offset, members in zip(known.offsets, pieces.groups, strict=True):
        for number, index in enumerate(members):
            offsets[index] = offset + number * sizes[index]
    return replace(known, offsets=tuple(offsets), sizes=tuple(sizes))


def stand_in(whole: keras.Variable, value: Any) -> keras.Variable:
    """A variable of another value, and perhaps another shape, that is to an optimizer what the whole one is."""
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
    """Has an optimizer that is not built update parts in place of whole variables, and decay those that it would.

    Args:
        optimizer: not built.
        wholes: some variables, perhaps excluded from its weight decay.
        parts: what replaces each; there may be more behind them.
    """
    known = vars(optimizer)
    if excluded := known.get("_exclude_from_weight_decay"):
        pattern = known.get("_exclude_from_weight_decay_pattern")
        pairs = zip(wholes, parts, strict=False)
        left_out = [part for whole, part in pairs if optimizer._var_key(whole) in excluded]
        optimizer.exclude_from_weight_decay(left_out, None if pattern is None else [pattern.pattern])
    optimizer.build(list(parts))


def slots_of(optimizer: keras.optimizers.Optimizer, weights: Sequence[str]) -> list[tuple[keras.Variable, str, str]]:
    """(variable, slot, weight) of an optimizer that is built; of what belongs to no weight, its name and nothing.

    Keras begins names of slots with the path of their weight. Of those that have one name (Adafactor's), the slot is
    the attribute in which the optimizer keeps one for each weight.

    Args:
        optimizer: built.
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
    """(slot, weight) by a path such as ``adam/model_dense_kernel_momentum``."""
    own = path.split("/", 1)[-1]
    weight = max((each for each in weights if own.startswith(f"{each}_")), key=len, default="")
    return (own[len(weight) + 1 :], weight) if weight else (own, "")


def flat(path: str) -> str:
    """A weight's path as optimizers write it before the names of slots."""
    return path.replace("/", "_")


class ShardedReducer:
    """See reduce.tensorflow_reducer.Reducer. The sums are those of this rank's rows alone, then the slots."""

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
        """This rank's rows, in each place that it leaves them in."""
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
        """All variables, as all ranks together have updated them; in a TensorFlow function or outside.

        Args:
            updated: this rank's rows.
            before: called when they are complete.
            after: called when the others' are there.
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
