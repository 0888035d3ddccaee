"""What a strategy is: one way to distribute the updates of a Keras model over ranks, one folder each.

``open_keras`` asks all strategies in a fixed order; the first one that a run uses prepares its model. The last
one keeps weights whole.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from hpctrain.backends.tensorflow.reduce.reducer import KerasReducers, Reducer
from hpctrain.backends.tensorflow.reduce.sparse_sums import Gradients, sparse_variables
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
    """A task that can be trained, with what strategies need to know of the run."""

    task: KerasTask
    world: World
    config: StepSettings
    clock: StepClock
    choice: ReducerChoice
    features: Mapping[Feature, Any]
    """That the run uses."""

    @property
    def variables(self) -> list[keras.Variable]:
        """Those that are trained."""
        return list(self.task.model.trainable_variables)


@dataclass(frozen=True)
class Prepared:
    """What a strategy has made of a model and its optimizer."""

    travelling: Gradients
    """Of trained variables, as they are exchanged."""
    reducers: Reducers[Reducer]
    """Among which there is a choice."""
    reducer: Reducer | None
    """None if it has to be measured."""
    open_update: Callable[[Applying], WeightUpdate] | None
    """Of a step; None if the model's own ``train_step`` updates."""
    slots: OwnSlots | None = None
    """Where the optimizer's state lies in that of whole weights."""
    parts: Sequence[tf.Variable] = ()
    """Variables that stand for parts of weights, and are not saved by themselves."""
    require: Callable[[Sequence[VariableTensor]], object] = len
    """Raises UserError if the strategy cannot save what the optimizer holds."""


Strategy: TypeAlias = Callable[[], Prepared]
"""One that a run uses: builds the optimizer. Collective. Raises UserError if the optimizer cannot be distributed so."""
Planner: TypeAlias = Callable[[Opening], Strategy | None]
"""The strategy, or None if the run does not use it."""


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
