"""``parallel.shard: optimizer``: each rank's optimizer updates some rows of the weights; all ranks then gather them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import keras
import tensorflow as tf

from hpctrain.backends.named_state import require_same_model
from hpctrain.backends.tensorflow.reduce.reducer import Pieces, broadcast
from hpctrain.backends.tensorflow.reduce.sparse_sums import Gradients
from hpctrain.backends.tensorflow.state.tensors import OwnSlots, VariableTensor
from hpctrain.backends.tensorflow.steps.passes import Applying
from hpctrain.backends.tensorflow.strategies.strategy import Opening, Prepared, Strategy
from hpctrain.backends.tensorflow.strategies.zero1.probe import try_optimizer
from hpctrain.backends.tensorflow.strategies.zero1.sharded import (
    NOTHING,
    Sharded,
    ShardedReducer,
    ShardedReducers,
    build_on,
    flat,
    shard,
)
from hpctrain.comm.group import Group
from hpctrain.config.combinations import Feature, Uses, refuse, used
from hpctrain.train.clock import Phase, StepClock
from hpctrain.train.state import Cut


def planned(opening: Opening) -> Strategy | None:
    """Returns the strategy if ``parallel.shard`` is set and there are several ranks."""
    is_used = Feature.SHARD in opening.features and opening.world.data.size > 1
    return functools.partial(shard_weights, opening) if is_used else None


def shard_weights(opening: Opening) -> Prepared:
    """Builds the optimizer on the rows that this rank updates. Collective."""
    task, data = opening.task, opening.world.data
    variables = opening.variables
    travelling = Gradients(variables, [], data)
    sharded, slots = share_out(task.optimizer, variables, travelling.pieces, data, opening.features)
    reducers = ShardedReducers(sharded)
    reducer = opening.choice.known(reducers)
    assert isinstance(reducer, ShardedReducer), "there is one, which is known"
    open_update = functools.partial(ShardedUpdate, task.optimizer, variables, reducer, opening.clock)
    parts = [one.value for one in sharded.updated]
    return Prepared(travelling, reducers, reducer, open_update, slots, parts, functools.partial(require_rows, opening))


def require_rows(opening: Opening, tensors: Sequence[VariableTensor]) -> None:
    """Raises UserError if the optimizer holds state that cannot be placed in rows."""
    if any(tensor.name.startswith("held/optimizer/") for tensor in tensors):
        kind = type(opening.task.optimizer).__name__
        refuse({**opening.features, Feature.OWN_OPTIMIZER_STATE: kind})


def share_out(
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
    told = group.allgather((verdict.is_alone, verdict.by_rows), "compare how optimizer state can be split")
    coupled = not all(is_alone for is_alone, _ in told)
    refuse(dict(features) | used({Feature.NON_ELEMENTWISE: coupled and type(optimizer).__name__}))
    by_rows = [all(one) for one in zip(*(by_rows for _, by_rows in told), strict=True)]
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
