"""What the step programs of a trainable Keras task are made from."""

from __future__ import annotations

from dataclasses import dataclass

import keras

from hpctrain.comm.world import World
from hpctrain.reduce.reducer_choice import ReducerChoice
from hpctrain.tasks.definition import KerasTask
from hpctrain.train.clock import StepClock
from hpctrain.train.framework import StepSettings


@dataclass(frozen=True)
class KerasStepContext:
    """A task with the settings of its updates."""

    task: KerasTask
    world: World
    config: StepSettings
    clock: StepClock
    choice: ReducerChoice

    @property
    def variables(self) -> list[keras.Variable]:
        """The trained variables."""
        return list(self.task.model.trainable_variables)
