"""The protocol of strategies: ways to partition a model, its optimizer or its gradients over ranks.

``open_torch`` applies all strategies in the order of ``listed``; each decides itself whether a run uses it. The last
one is here: it replicates what no other one has partitioned, and sums its gradients over ranks with different samples.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

from torch.nn import Module
from torch.optim import Optimizer

from hpctrain.backends.named_state import plain_name
from hpctrain.backends.torch.device import Compute
from hpctrain.backends.torch.reduce.reducer import Reducer
from hpctrain.backends.torch.reduce.torch_reducers import TorchReducerFactory
from hpctrain.backends.torch.state.optimizer import OptimizerPart, Slots
from hpctrain.backends.torch.steps.update_step import ForwardBackward, StepParts
from hpctrain.backends.torch.steps.updates import AnyReducerFactory
from hpctrain.backends.torch.strategies.exchange import Exchange, exchange_for, over_torch
from hpctrain.backends.torch.strategies.parameter_traits import ELEMENTWISE, ParameterTraits, plain, traits_of
from hpctrain.backends.torch.strategies.partition import Partition, uncut
from hpctrain.backends.torch.strategies.pipeline.stage_schedule import StageChoice
from hpctrain.backends.torch.strategies.tp_group import TPGroup
from hpctrain.backends.torch.task.shares import Share, shares_of, sparse_parameters
from hpctrain.backends.torch.task.task_state import TaskState
from hpctrain.backends.update import rule_of
from hpctrain.comm.group import Group
from hpctrain.comm.world import World
from hpctrain.config.combinations import refuse
from hpctrain.config.features import Feature, used
from hpctrain.tasks.definition import TorchTask
from hpctrain.train.clock import Neighbours, StepClock, Waiting
from hpctrain.train.framework import StepSettings
from hpctrain.train.state import StateTensor


@dataclass(frozen=True)
class StrategyContext:
    """A task that can be trained, with what strategies need to know about the run."""

    task: TorchTask
    world: World
    config: StepSettings
    compute: Compute
    clock: StepClock
    model: Module
    """All models of the task as one module."""
    task_state: TaskState
    parts: Sequence[OptimizerPart]
    """All optimizers of the task."""
    features: Mapping[Feature, Any]
    """Features that the run uses."""
    joins: bool
    """Whether BatchNorm layers normalise over the samples of all ranks."""
    meta_init: frozenset[str]
    """Names of parameters that are created without values."""
    stage_choice: StageChoice
    """How layers are divided into pipeline stages."""

    @property
    def optimizers(self) -> list[Optimizer]:
        """Optimizers that update parameters themselves."""
        return plain(self.parts)

    def divides(self, what: Feature) -> bool:
        """Whether the run uses this feature on several data-parallel ranks."""
        return what in self.features and self.world.data.size > 1

    @property
    def gathers(self) -> bool:
        """Whether ranks have rows of parameters, and gather layers to compute."""
        return self.divides(Feature.SHARD_PARAMETERS) or self.divides(Feature.SHARD_GRADIENTS)

    @cached_property
    def traits(self) -> ParameterTraits:
        """What optimizers allow. Raises UserError if one may update a parameter from others."""
        traits = traits_of(self.parts)
        refuse({**self.features, **used({Feature.UNKNOWN_OPTIMIZER: traits.unknown})})
        return traits

    def exchange(self, group: Group, neighbours: Neighbours) -> Exchange:
        """Opens an exchange of tensors within a group. Collective."""
        device = self.compute.device
        opens = over_torch if self.config.reduce.kind == "nccl" and device.type == "cpu" else exchange_for
        return opens(group, device, Waiting(self.clock, neighbours))

    def tp_group(self, group: Group, neighbours: Neighbours) -> TPGroup:
        """Opens the communication of ranks that split layers. Collective."""
        exact = self.config.parallel.tensor_exact
        return TPGroup(group, self.clock, self.exchange(group, neighbours), neighbours, exact)

    def names(self) -> dict[int, str]:
        """Names of the model's current parameters, by id."""
        return {id(parameter): plain_name(name) for name, parameter in self.model.named_parameters()}

    def shares(self) -> dict[str, Share]:
        """The model's current parameters, by optimizer."""
        return shares_of(self.task, self.model, self.parts)


@dataclass(frozen=True)
class ParameterUpdates:
    """Which parameters this rank's optimizers update, and how their gradients are exchanged."""

    shares: Mapping[str, Share]
    """Parameters by optimizer."""
    names: Mapping[int, str]
    """Names of parameters and of rows of them, by id."""
    slots: Slots
    """Where this rank's optimizer state is in that of whole parameters."""
    reducers: Mapping[str, AnyReducerFactory]
    """Reducers by optimizer."""


def identity(anything: Any) -> Any:
    """The same."""
    return anything


@dataclass(frozen=True)
class PreparedModel:
    """The state of a model after the strategies applied so far."""

    partition: Partition = field(default_factory=uncut)
    """The part of the model that this rank has."""
    updates: ParameterUpdates | None = None
    """Set by exactly one strategy."""
    root: Module | None = None
    """The module with all layers that passes call, if it is not the model."""
    forward_backward: Callable[[StepParts], ForwardBackward] | None = None
    """Makes what runs passes, replacing the model in them; None if the model itself is called."""
    num_layers: int = 0
    """See train.framework.Facts."""
    total_norm: Callable[[Partition, Reducer], float] = Partition.norm
    """L2 norm of the gradients of the whole model, on all ranks, of which each has a part. Collective."""
    complete: Callable[[Reducer], object] = id
    """Completes the gradients that ranks have summed, before they are scaled. Collective, as passes must be then."""
    placed: Callable[[Iterable[StateTensor]], list[StateTensor]] = list
    """Selects the state that this rank saves, and sets its place in the whole."""
    compile_model: Callable[[Any], Any] = identity
    """Compiles a whole model, unless its layers are compiled already."""
    compile_loss: Callable[[Any], Any] = identity
    """Compiles the loss."""
    uncompiled: Callable[[], AbstractContextManager[object]] = nullcontext
    """Context in which nothing is compiled, and what is compiled already runs as it was written."""
    advice: Sequence[str] = ()
    """What to say at the start; see train.framework.Facts."""
    close: Callable[[], object] = lambda: None
    """Closes exchanges that do not belong to the partition."""

    @property
    def is_collective(self) -> bool:
        """Whether forward passes are collective."""
        return self.partition.is_collective or self.forward_backward is not None


Strategy: TypeAlias = Callable[[PreparedModel], PreparedModel]
"""A strategy of a run: changes model and optimizers in place, and returns the result. Collective. Raises UserError if
the model or an optimizer cannot be partitioned this way."""
Planner: TypeAlias = Callable[[StrategyContext], Strategy | None]
"""Checks a task before any strategy has changed it; returns the strategy, or None if the run does not use it. Does not
communicate. Raises UserError if the task cannot be trained this way."""


def planned(context: StrategyContext) -> Strategy:
    """Always applies: replicates what no earlier strategy has partitioned."""
    return functools.partial(replicate, context)


def replicate(context: StrategyContext, prepared: PreparedModel) -> PreparedModel:
    """Makes every rank update all parameters that it has."""
    if prepared.updates is not None:
        return prepared
    model = context.model
    config = context.config.reduce
    partition = prepared.partition
    sparse = sparse_parameters(model, context.parts, config.sparse)
    names, shares = context.names(), context.shares()
    slices = partition.slices
    slots = Slots({place: slices[name] for place, name in names.items() if name in slices})
    norm, by_parts = needs_norm(context, partition), updates_by_parts(context, prepared)
    reducers = {
        name: TorchReducerFactory(share, config, share.those_of(sparse), norm, by_parts)
        for name, share in shares.items()
    }
    return dataclasses.replace(prepared, updates=ParameterUpdates(shares, names, slots, reducers))


def needs_norm(context: StrategyContext, partition: Partition) -> bool:
    """Whether an exchange must compute the gradient norm; a partition with slices computes it itself."""
    return rule_of(context.config.train).needs_norm and not partition.slices


def updates_by_parts(context: StrategyContext, prepared: PreparedModel) -> bool:
    """Whether the task's optimizer may update some parameters before the gradients of others are there."""
    task = context.task
    is_elementwise = task.step is None and type(task.optimizer) in ELEMENTWISE
    return is_elementwise and not prepared.is_collective and not rule_of(context.config.train).needs_norm
