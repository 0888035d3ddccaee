"""From a PyTorch task to a model that is on this rank's device, and equal on all ranks."""

from __future__ import annotations

import torch

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
from hpctrain.frameworks.torch.optimizer import OptimizerState, Slots
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
from hpctrain.frameworks.torch.shares import ONLY, shares_of, whole_model
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
    train, model = config.train, whole_model(task)
    device = pick_device(world.local_rank)
    require_same_kind(device, world)
    if train.threads is not None:  # a supervisor has set it in the environment; mpirun has not
        torch.set_num_threads(train.threads)
    own = {"loss": task.loss, "forward": task.forward, "step": task.step}
    holdings = Holdings(task.optimizer, own, model, [one.value for one in kept_objects(task)])
    parts = holdings.parts()
    require_trainable(model, [part.optimizer for part in parts])
    ranks = world.data.size
    joins = wants_joint_statistics(model, train.sync_batchnorm)
    features = config.features() | model_features(model, parts, joins, ranks, unsuited(parts, holdings))
    features |= used({Feature.CARRIED: carried_by(task), Feature.TORCH_METRICS: of_torchmetrics(task)})
    features |= pipeline_features(task, holdings)
    valueless = without_values(model, parts)
    features |= used({Feature.VALUELESS: next(iter(valueless), None)})
    refuse(features)
    layers = planned(model, task.tensor, config.parallel.tensor)
    tables = tables_of(model, task.tensor) if Feature.SHARD_TABLES in features and ranks > 1 else []
    move(model, device, memory_format_of(train))
    shards, divides = (one in features and ranks > 1 for one in (Feature.SHARD, Feature.SHARD_PARAMETERS))
    judgement = judge(parts, device) if shards or divides or Feature.PIPELINE in features else Judgement()
    refuse(features | used({Feature.COUPLED: judgement.coupled}))
    stages = stages_of(task, model, config.parallel.pipeline)
    tensors = state_of(model)
    described = [
        (name, tuple(tensor.shape), str(tensor.dtype) + (" without values" if tensor.is_meta else ""))
        for name, tensor in tensors.items()
    ]
    require_same_model(world.everyone, described, "tensors")
    broadcast(world.everyone, [one for one in tensors.values() if not one.is_meta], "receive the model")
    doubled = other_names(model)
    tensor: TensorParallel = uncut()
    slots: Slots | None = None
    pipelined = None
    if world.tensor.size > 1:  # one process that only tries the task has all of it
        updaters = world.data if shards else None
        within = open_exchange(world.tensor, device, Waiting(clock))
        tensor = cut_model(model, layers, world.tensor, world.data, plain(parts), clock, updaters, within)
    if tables:
        among = open_exchange(world.data, device, Waiting(clock, Neighbours.TABLES))
        tensor = cut_tables(model, tables, world.data, plain(parts), clock, among)
    recompute(model, train.recompute, tensor.region)
    if stages is not None and world.pipeline.size > 1:
        half, images = LOW_PRECISION.get(train.precision), memory_format_of(train)
        stages = Whole(task, model, holdings, tensor, device, half, images).chosen(stages, stage_choice, world)
        between = open_exchange(world.pipeline, device, Waiting(clock, Neighbours.PIPELINE))
        pipelined = keep_own_stage(task, model, stages, plain(parts), tensor, world, device, clock, between)
    give_memory(model, device)
    names = {id(parameter): plain_name(name) for name, parameter in model.named_parameters()}
    if tensor.slices:
        slots = Slots(slices={place: tensor.slices[name] for place, name in names.items() if name in tensor.slices})
    shares = shares_of(task, model, parts)
    sharding, divided = None, None
    needs_norm = UpdateRule(train.clip_norm, LossScale() if train.precision == "fp16" else None).needs_norm
    if divides:
        refuse(features | used({Feature.WHOLE_TENSORS: uncuttable(shares, parts, judgement, world)}))
        divided = shard_parameters(model, tensor, world, parts, judgement)
        tensor, shares, slots = divided.tensor, divided.shares, divided.slots
        names |= divided.names
    if shards:
        sharding = share_out_optimizers(shares, parts, judgement, world, names, tensor)
        needs_norm = needs_norm and not tensor.slices  # which then count each element once
        names |= sharding.names
        slots = sharding.slots
    optimizer_state = OptimizerState(parts, names, slots)
    if device.type != "cpu":
        optimizer_state.to_device()
    sparse = sparse_parameters(model, parts, config.reduce.sparse)
    of: dict[str, TorchReducers | ShardedReducers | FullyShardedReducers] = {}
    if sharding is not None:
        of |= {name: ShardedReducers(its, config.reduce, needs_norm, plain(parts)) for name, its in sharding.of.items()}
    elif divided is not None:
        of |= {ONLY: FullyShardedReducers(divided.tensor, plain(parts), divided.group)}
    else:
        apart = [one for one in model.parameters() if id(one) in tensor.complete]
        of |= {
            name: TorchReducers(share, config.reduce, share.those_of(sparse), apart) for name, share in shares.items()
        }
    reducers = ExchangesToChoose(of)
    joint = SyncBatchNorm(model, world.data, clock) if joins and ranks > 1 else None
    ready = ReadyTask(
        task,
        model,
        shares,
        device,
        holdings,
        optimizer_state,
        reducers,
        choice.known(reducers),
        tensor,
        doubled,
        joint,
        pipelined,
        frozenset(valueless),
    )
    framework = TorchFramework(ready, world, config, clock, choice)
    framework.reseed(0)
    return framework
