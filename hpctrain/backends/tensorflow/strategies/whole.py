"""Whole weights: gradients are summed by the update, or where a model's own ``train_step`` applies them."""

from __future__ import annotations

import functools

from hpctrain.backends.tensorflow.reduce.reducer import KerasReducers
from hpctrain.backends.tensorflow.reduce.sparse_sums import Gradients, sparse_variables
from hpctrain.backends.tensorflow.steps.passes import Update
from hpctrain.backends.tensorflow.strategies.strategy import Opening, Prepared, Strategy
from hpctrain.backends.tensorflow.task.overrides import trains_itself


def planned(opening: Opening) -> Strategy:
    """What no other strategy distributes is replicated; of a model that trains itself, its ``train_step`` updates."""
    return functools.partial(leave_updates if trains_itself(opening.task.model) else replicate, opening)


def replicate(opening: Opening) -> Prepared:
    """Every rank updates all weights."""
    task, config = opening.task, opening.config
    variables, data = opening.variables, opening.world.data
    sparse = sparse_variables(variables, task.model, task.optimizer, config, data.size)
    travelling = Gradients(variables, sparse, data)
    reducers = KerasReducers(travelling.pieces, config.reduce.compress_after_steps)
    reducer = opening.choice.known(reducers)
    task.optimizer.build(variables)
    return Prepared(travelling, reducers, reducer, functools.partial(Update, task.optimizer, variables, travelling))


def leave_updates(opening: Opening) -> Prepared:
    """The model's ``train_step`` updates."""
    travelling = Gradients(opening.variables, [], opening.world.data)
    return Prepared(travelling, KerasReducers(travelling.pieces), None, None)
