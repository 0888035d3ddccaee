"""From a PyTorch task to a model that is on this rank's device, and equal on all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hpctrain.comm.group import Group
from hpctrain.comm.world import World
from hpctrain.config.combinations import Feature, refuse, used
from hpctrain.config.sections import Config
from hpctrain.frameworks.loss_scale import LossScale
from hpctrain.frameworks.named_state import plain_name, require_same_model
from hpctrain.frameworks.torch.carried import carried_by
from hpctrain.frameworks.torch.checks import model_features, require_trainable
from hpctrain.frameworks.torch.device import pick_device, require_same_kind
from hpctrain.frameworks.torch.framework import LOW_PRECISION, ReadyTask, TorchFramework, memory_format_of
from hpctrain.frameworks.torch.holdings import Holdings
from hpctrain.frameworks.torch.layer_times import Whole
from hpctrain.frameworks.torch.metrics import of_torchmetrics
from hpctrain.frameworks.torch.optimizer import OptimizerState, Part, Slots
from hpctrain.frameworks.torch.pipelined import keep_own_stage, pipeline_features, stages_of
from hpctrain.frameworks.torch.recompute import recompute
from hpctrain.frameworks.torch.sharding import (
    Judgement,
    judge,
    plain,
    shard_parameters,
    share_out_optimizers,
    uncuttable,
    unsuited,
)
from hpctrain.frameworks.torch.shares import ONLY, Share, shares_of, whole_model
from hpctrain.frameworks.torch.sparse import sparse_parameters
from hpctrain.frameworks.torch.state import other_names, state_of
from hpctrain.frameworks.torch.sync_batchnorm import SyncBatchNorm, wants_joint_statistics
from hpctrain.frameworks.torch.updates import ExchangesToChoose
from hpctrain.frameworks.torch.valueless import give_memory, move, without_values
from hpctrain.frameworks.update import UpdateRule
from hpctrain.parallel.stage_choice import BY_PARAMETERS, StageChoice
from hpctrain.parallel.torch_exchange import OpenExchange, Waiting, exchange_for
from hpctrain.parallel.torch_fully_sharded import FullyShardedReducers
from hpctrain.parallel.torch_sharded import ShardedReducers
from hpctrain.parallel.torch_tables import cut_tables, tables_of
from hpctrain.parallel.torch_tensor import TensorParallel, cut_model, planned, uncut
from hpctrain.reduce.reducer_choice import ReducerChoice
from hpctrain.reduce.torch_reducer import TorchReducers, broadcast
from hpctrain.tasks.definition import TorchTask, kept_objects
from hpctrain.train.clock import Neighbours, StepClock


def open_torch(
    task: TorchTask,
    world: World,
    config: Config,
    clock: StepClock,
    choice: ReducerChoice,
    open_exchange: OpenExchange = exchange_for,
    stage_choice: StageChoice = BY_PARAMETERS,
) -> TorchFramework:
    """A framework whose model is on this rank's device and equal on all ranks. Collective.

    Args:
        task: a TorchTask.
        world: the ranks.
        config: of the run.
        clock: marks where the time of a step goes.
        choice: how the reducer is chosen.
        open_exchange: opens what ranks that share out a model exchange tensors by.
        stage_choice: how layers are shared out among stages.

    Raises:
        UserError: the task cannot be trained, the ranks' models differ, or the reducer that the configuration names
            cannot be used.
    """
    train = config.train
    device = pick_device(world.local_rank)
    require_same_kind(device, world)
    if train.threads is not None:  # a supervisor has set it in the environment; mpirun has not
        torch.set_num_threads(train.threads)
    known = look_at(task, world, config)
    model, parts = known.model, known.parts
    layers = planned(model, task.tensor, config.parallel.tensor)
    tables = tables_of(model, task.tensor) if Feature.SHARD_TABLES in known.features else []
    move(model, device, memory_format_of(train))
    judgement = judged(known, device)
    stages = stages_of(task, model, config.parallel.pipeline)
    make_equal(model, world.everyone)
    doubled = other_names(model)
    tensor = uncut()
    if world.tensor.size > 1:  # one process that only tries the task has all of it
        updaters = world.data if known.divides(Feature.SHARD) else None
        within = open_exchange(world.tensor, device, Waiting(clock))
        tensor = cut_model(model, layers, world.tensor, world.data, plain(parts), clock, updaters, within)
    if known.divides(Feature.SHARD_TABLES):  # one process has all rows
        among = open_exchange(world.data, device, Waiting(clock, Neighbours.TABLES))
        tensor = cut_tables(model, tables, world.data, plain(parts), clock, among)
    recompute(model, train.recompute, tensor.region)
    pipelined = None
    if stages is not None and world.pipeline.size > 1:
        half, images = LOW_PRECISION.get(train.precision), memory_format_of(train)
        stages = Whole(task, model, known.holdings, tensor, device, half, images).chosen(stages, stage_choice, world)
        between = open_exchange(world.pipeline, device, Waiting(clock, Neighbours.PIPELINE))
        pipelined = keep_own_stage(task, model, stages, plain(parts), tensor, world, device, clock, between)
    give_memory(model, device)
    updates = share_out(known, judgement, tensor)
    optimizer_state = OptimizerState(parts, updates.names, updates.slots)
    if device.type != "cpu":
        optimizer_state.to_device()
    reducers = ExchangesToChoose(updates.exchanges)
    ready = ReadyTask(
        task,
        model,
        updates.shares,
        device,
        known.holdings,
        optimizer_state,
        reducers,
        choice.known(reducers),
        updates.tensor,
        doubled,
        SyncBatchNorm(model, world.data, clock) if known.joins and world.data.size > 1 else None,
        pipelined,
        known.valueless,
    )
    framework = TorchFramework(ready, world, config, clock, choice)
    framework.reseed(0)
    return framework


@dataclass(frozen=True)
class Known:
    """A task that can be trained, before anything is done to its model."""

    task: TorchTask
    world: World
    config: Config
    model: torch.nn.Module
    """All models of the task as one."""
    holdings: Holdings
    parts: Sequence[Part]
    """All of its optimizers."""
    features: Mapping[Feature, Any]
    """That the run uses."""
    joins: bool
    """Whether BatchNorm is over the samples of all ranks."""
    valueless: frozenset[str]
    """Parameters that are made without values."""

    def divides(self, what: Feature) -> bool:
        """Whether the ranks that see different samples share something out."""
        return what in self.features and self.world.data.size > 1


def look_at(task: TorchTask, world: World, config: Config) -> Known:
    """Raises UserError if a task cannot be trained as the configuration says."""
    model = whole_model(task)
    own = {"loss": task.loss, "forward": task.forward, "step": task.step}
    holdings = Holdings(task.optimizer, own, model, [one.value for one in kept_objects(task)])
    parts = holdings.parts()
    require_trainable(model, [part.optimizer for part in parts])
    joins = wants_joint_statistics(model, config.train.sync_batchnorm)
    features = config.features() | model_features(model, parts, joins, world.data.size, unsuited(parts, holdings))
    features |= used({Feature.CARRIED: carried_by(task), Feature.TORCH_METRICS: of_torchmetrics(task)})
    features |= pipeline_features(task, holdings)
    valueless = without_values(model, parts)
    features |= used({Feature.VALUELESS: next(iter(valueless), None)})
    refuse(features)
    return Known(task, world, config, model, holdings, parts, features, joins, frozenset(valueless))


def judged(known: Known, device: torch.device) -> Judgement:
    """How the parameters may be shared out, if they are to be; raises UserError if they may not."""
    divides = known.divides(Feature.SHARD) or known.divides(Feature.SHARD_PARAMETERS)
    judgement = judge(known.parts, device) if divides or Feature.PIPELINE in known.features else Judgement()
    refuse({**known.features, **used({Feature.COUPLED: judgement.coupled})})
    return judgement


def make_equal(model: torch.nn.Module, everyone: Group) -> None:
    """Gives all ranks the first one's values; raises UserError if their models differ. Collective."""
    tensors = state_of(model)
    described = [
        (name, tuple(tensor.shape), str(tensor.dtype) + (" without values" if tensor.is_meta else ""))
        for name, tensor in tensors.items()
    ]
    require_same_model(everyone, described, "tensors")
    broadcast(everyone, [one for one in tensors.values() if not one.is_meta], "receive the model")


@dataclass(frozen=True)
class Updates:
    """Which parameters this rank's optimizers update, and how their gradients are exchanged."""

    tensor: TensorParallel
    shares: Mapping[str, Share]
    names: Mapping[int, str]
    """Of parameters and of rows of them, by id."""
    slots: Slots | None
    exchanges: Mapping[str, TorchReducers | ShardedReducers | FullyShardedReducers]
    """By optimizer."""


def share_out(known: Known, judgement: Judgement, tensor: TensorParallel) -> Updates:
    """Leaves each rank's optimizers what they are to update. Collective.

    Args:
        known: its model is on the device.
        judgement: how parameters may be shared out.
        tensor: what this rank has of the model.

    Raises:
        UserError: an optimizer's parameters cannot be shared out as the configuration says.
    """
    model, parts, world, config = known.model, known.parts, known.world, known.config
    names = {id(parameter): plain_name(name) for name, parameter in model.named_parameters()}
    shares = shares_of(known.task, model, parts)
    if known.divides(Feature.SHARD_PARAMETERS):
        refuse({**known.features, **used({Feature.WHOLE_TENSORS: uncuttable(shares, parts, judgement, world)})})
        divided = shard_parameters(model, tensor, world, parts, judgement)
        one = FullyShardedReducers(divided.tensor, plain(parts), divided.group)
        return Updates(divided.tensor, divided.shares, {**names, **divided.names}, divided.slots, {ONLY: one})
    if known.divides(Feature.SHARD):
        sharding = share_out_optimizers(shares, parts, judgement, world, names, tensor)
        scale = LossScale() if config.train.precision == "fp16" else None
        # Slices of layers count each element of a norm once themselves.
        needs_norm = UpdateRule(config.train.clip_norm, scale).needs_norm and not tensor.slices
        each = {
            name: ShardedReducers(its, config.reduce, needs_norm, plain(parts)) for name, its in sharding.of.items()
        }
        return Updates(tensor, shares, {**names, **sharding.names}, sharding.slots, each)
    sparse = sparse_parameters(model, parts, config.reduce.sparse)
    apart = [one for one in model.parameters() if id(one) in tensor.complete]
    cut = {place: tensor.slices[name] for place, name in names.items() if name in tensor.slices}
    each_share = {
        name: TorchReducers(share, config.reduce, share.those_of(sparse), apart) for name, share in shares.items()
    }
    return Updates(tensor, shares, names, Slots(cut) if cut else None, each_share)
