"""What a strategy is: one way to partition a model, its optimizer or its gradients among ranks, in a separate module.

``open_torch`` applies all strategies in the order of ``listed``; each decides by itself whether a run uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch.optim import Optimizer

from hpctrain.backends.named_state import plain_name
from hpctrain.backends.torch.device import Compute
from hpctrain.backends.torch.state.optimizer import Part, Slots
from hpctrain.backends.torch.steps.update_step import PassRunner
from hpctrain.backends.torch.steps.updates import ReducerSource
from hpctrain.backends.torch.strategies.exchange import Exchange, OpenExchange
from hpctrain.backends.torch.strategies.parameter_traits import ParameterTraits, plain, try_optimizers
from hpctrain.backends.torch.strategies.partition import Partition, uncut
from hpctrain.backends.torch.strategies.region import Region
from hpctrain.backends.torch.task.holdings import Holdings
from hpctrain.backends.torch.task.shares import Share, shares_of
from hpctrain.comm.group import Group
from hpctrain.comm.world import World
from hpctrain.config.combinations import Feature, refuse, used
from hpctrain.parallel.pipeline import StageChoice
from hpctrain.tasks.definition import TorchTask
from hpctrain.train.clock import Neighbours, StepClock, Waiting
from hpctrain.train.framework import StepSettings
from hpctrain.train.state import StateTensor


@dataclass(frozen=True)
class Opening:
    """A task that can be trained, with what strategies need to know of the run."""

    task: TorchTask
    world: World
    config: StepSettings
    compute: Compute
    clock: StepClock
    model: torch.nn.Module
    """All models of the task as one."""
    holdings: Holdings
    parts: Sequence[Part]
    """All of its optimizers."""
    features: Mapping[Feature, Any]
    """That the run uses."""
    joins: bool
    """Whether BatchNorm is over the samples of all ranks."""
    meta_init: frozenset[str]
    """Parameters that are made without values."""
    open_exchange: OpenExchange
    """Opens what ranks exchange tensors by."""
    stage_choice: StageChoice
    """How layers are distributed over stages."""

    @property
    def optimizers(self) -> list[Optimizer]:
        """Those that update something themselves."""
        return plain(self.parts)

    def divides(self, what: Feature) -> bool:
        """Whether the ranks that see different samples partition something."""
        return what in self.features and self.world.data.size > 1

    @cached_property
    def traits(self) -> ParameterTraits:
        """What optimizers allow. Raises UserError if one updates parameters that depend on each other."""
        traits = try_optimizers(self.parts, self.compute.device)
        refuse({**self.features, **used({Feature.NON_ELEMENTWISE: traits.coupled})})
        return traits

    def exchange(self, group: Group, neighbours: Neighbours) -> Exchange:
        """Of tensors among the ranks of a group. Collective."""
        return self.open_exchange(group, self.compute.device, Waiting(self.clock, neighbours))

    def region(self, group: Group, neighbours: Neighbours) -> Region:
        """Of the ranks of a group. Collective."""
        return Region(group, self.clock, self.exchange(group, neighbours), neighbours)

    def names(self) -> dict[int, str]:
        """Of the parameters that the model has by now, by id."""
        return {id(parameter): plain_name(name) for name, parameter in self.model.named_parameters()}

    def shares(self) -> dict[str, Share]:
        """Parameters that the model has by now, by optimizer."""
        return shares_of(self.task, self.model, self.parts)


@dataclass(frozen=True)
class Updates:
    """Which parameters this rank's optimizers update, and how their gradients are exchanged."""

    shares: Mapping[str, Share]
    """Parameters by optimizer."""
    names: Mapping[int, str]
    """Of parameters and of rows of them, by id."""
    slots: Slots
    """Where optimizer state lies in that of whole parameters."""
    reducers: Mapping[str, ReducerSource]
    """By optimizer."""


@dataclass(frozen=True)
class Prepared:
    """What the strategies so far have made of a model."""

    partition: Partition = field(default_factory=uncut)
    """What this rank has of it."""
    updates: Updates | None = None
    """Decided by one strategy."""
    passes: PassRunner | None = None
    """What runs passes and stands for the model in them, if that is not the model itself."""
    num_layers: int = 0
    """See train.framework.Facts."""
    total_norm: Callable[[float], float] = float
    """Of the gradients of a whole model, from the norm over what this rank's partition covers. Collective."""
    placed: Callable[[Iterable[StateTensor]], list[StateTensor]] = list
    """What of this rank's state it saves, and where it lies in the whole."""
    close: Callable[[], object] = lambda: None
    """Ends exchanges that are not the partition's."""


Strategy: TypeAlias = Callable[[Prepared], Prepared]
"""One that a run uses: changes model and optimizers in place, and says what has become of them. Collective. Raises
UserError if the model or an optimizer cannot be partitioned so."""
Planner: TypeAlias = Callable[[Opening], Strategy | None]
"""Looks at a task before any strategy has changed it: the strategy, or None if the run does not use it. Asks no other
rank. Raises UserError if the task cannot be trained so."""
