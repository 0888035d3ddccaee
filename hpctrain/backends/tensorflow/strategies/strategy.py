"""The strategy protocol: one way to distribute a Keras model's updates over ranks. And the default: replication.

``open_keras`` asks all strategies in a fixed order; the first one that the run uses prepares its model. The last one
replicates the weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from hpctrain.backends.tensorflow.reducer import KerasReducers, Reducer
from hpctrain.backends.tensorflow.sparse_sums import Gradients, sparse_variables
from hpctrain.backends.tensorflow.state.tensors import OwnSlots, VariableTensor
from hpctrain.backends.tensorflow.steps.passes import Applying, Update, WeightUpdate
from hpctrain.backends.tensorflow.task.overrides import trains_itself
from hpctrain.comm.world import World
from hpctrain.config.combinations import Feature
from hpctrain.reduce.reducer_choice import ReducerChoice, Reducers
from hpctrain.tasks.definition import KerasTask
from hpctrain.train.clock import StepClock
from hpctrain.train.framework import StepSettings


@dataclass(frozen=True)
class Opening:
    """A trainable task with the run's settings that strategies need."""

    task: KerasTask
    world: World
    config: StepSettings
    clock: StepClock
    choice: ReducerChoice
    features: Mapping[Feature, Any]
    """Features that the run uses."""

    @property
    def variables(self) -> list[keras.Variable]:
        """The trained variables."""
        return list(self.task.model.trainable_variables)


@dataclass(frozen=True)
class Prepared:
    """A model and optimizer as prepared by a strategy."""

    packing: Gradients
    """Packs the gradients of the trained variables."""
    reducers: Reducers[Reducer]
    """Reducers to choose from."""
    reducer: Reducer | None
    """The reducer; None if it must be measured."""
    open_update: Callable[[Applying], WeightUpdate] | None
    """Makes the weight update; None if a custom ``train_step`` updates."""
    slots: OwnSlots | None = None
    """Place of the optimizer's sharded state within that of whole weights."""
    parts: Sequence[tf.Variable] = ()
    """Variables that stand for parts of weights and are not saved themselves."""
    require: Callable[[Sequence[VariableTensor]], object] = len
    """Raises UserError if the strategy cannot save some of the optimizer's state."""


Strategy: TypeAlias = Callable[[], Prepared]
"""Prepares the model and builds the optimizer. Collective. Raises UserError if it cannot distribute the optimizer."""
Planner: TypeAlias = Callable[[Opening], Strategy | None]
"""Returns the strategy, or None if the run does not use it."""


def planned(opening: Opening) -> Strategy:
    """The default: replication, or the model's custom ``train_step``."""
    return functools.partial(leave_updates if trains_itself(opening.task.model) else replicate, opening)


def replicate(opening: Opening) -> Prepared:
    """Prepares a model whose weights every rank updates in full."""
    task, config = opening.task, opening.config
    variables, data = opening.variables, opening.world.data
    sparse = sparse_variables(variables, task.model, task.optimizer, config, data.size)
    packing = Gradients(variables, sparse, data)
    reducers = KerasReducers(packing.pieces, config.reduce.compress_after_steps)
    reducer = opening.choice.known(reducers)
    task.optimizer.build(variables)
    return Prepared(packing, reducers, reducer, functools.partial(Update, task.optimizer, variables, packing))


def leave_updates(opening: Opening) -> Prepared:
    """Prepares a model that updates itself in ``train_step``."""
    packing = Gradients(opening.variables, [], opening.world.data)
    return Prepared(packing, KerasReducers(packing.pieces), None, None)
