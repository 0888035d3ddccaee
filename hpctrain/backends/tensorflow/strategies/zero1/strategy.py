"""``parallel.shard: optimizer``: each rank's optimizer updates some rows of the weights, and all ranks get them."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from hpctrain.backends.tensorflow.reduce.sparse_sums import Gradients
from hpctrain.backends.tensorflow.state.tensors import VariableTensor
from hpctrain.backends.tensorflow.strategies.strategy import Opening, Prepared, Strategy
from hpctrain.backends.tensorflow.strategies.zero1.sharded import ShardedReducer, ShardedReducers
from hpctrain.backends.tensorflow.strategies.zero1.sharding import ShardedUpdate, share_out
from hpctrain.config.combinations import Feature, refuse


def planned(opening: Opening) -> Strategy | None:
    """None on one rank, too."""
    is_used = Feature.SHARD in opening.features and opening.world.data.size > 1
    return functools.partial(shard_weights, opening) if is_used else None


def shard_weights(opening: Opening) -> Prepared:
    """Gives the optimizer the rows that this rank updates."""
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
    """Raises UserError if the optimizer holds what has no rows."""
    if any(tensor.name.startswith("held/optimizer/") for tensor in tensors):
        kind = type(opening.task.optimizer).__name__
        refuse({**opening.features, Feature.OWN_OPTIMIZER_STATE: kind})
