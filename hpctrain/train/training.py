"""A training run under way, as hooks see it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from hpctrain.comm.world import World
from hpctrain.train.clock import StepClock
from hpctrain.train.framework import Framework
from hpctrain.train.metrics import Evaluation
from hpctrain.train.plan import Plan
from hpctrain.train.schedule import Schedule
from hpctrain.train.state import TrainState


@dataclass
class Training:
    """Who trains what, how far it has come, and how far it is to go."""

    world: World
    """The ranks."""
    framework: Framework
    """The model on this rank's device."""
    schedule: Schedule
    """From the step to the factors on the optimizer's own learning rates: one, or one for each parameter group."""
    plan: Plan
    """How long the run is, and when it evaluates."""
    clock: StepClock
    """Where the time of a step goes: a hook may mark its own."""
    state: TrainState
    """How far it has come; read it, do not change it."""
    folder: Path = field(default=Path(), kw_only=True)
    """The run folder, for what hooks leave there."""
    evaluation: Evaluation = field(default_factory=Evaluation, kw_only=True)
    """The last one of this attempt."""
