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
from hpctrain.frameworks.torch.framework import ReadyTask, TorchFramework, memory_format_of
from hpctrain.frameworks.torch.holdings import Holdings
from hpctrain.frameworks.torch.optimizer import OptimizerState, Slots, Together
from hpctrain.frameworks.torch.recompute import recompute
from hpctrain.frameworks.torch.sharding import judge, plain, share_out_optimizers, unsuited
from hpctrain.frameworks.torch.shares import shares_of, whole_model
from hpctrain.frameworks.torch.sparse import sparse_parameters
from hpctrain.frameworks.torch.state import (
    state_of,
)
from hpctrain.frameworks.torch.sync_batchnorm import SyncBatchNorm, wants_joint_statistics
from hpctrain.frameworks.torch.updates import ExchangesToChoose
from hpctrain.frameworks.update import UpdateRule
from hpctrain.parallel.torch_sharded import ShardedReducers
from hpctrain.parallel.torch_tensor import cut_model, planned, uncut
from hpctrain.reduce.reducer_choice import ReducerChoice
from hpctrain.reduce.torch_reducer import TorchReducers, broadcast
from hpctrain.tasks.definition import TorchTask, kept_objects
from hpctrain.train.clock import StepClock


def open_torch(
    task: TorchTask, world: World, config: Config, clock: StepClock, choice: ReducerChoice
) -> TorchFramework:
    """A framework whose model is on this rank's device and equal on all ranks. Collective.

    Args:
        task: a TorchTask.
        world: the ranks.
        config: of the run.
        clock: marks where the time of a step goes.
        choice: how the reducer is chosen.

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
    features |= used({Feature.CARRIED: carried_by(task)})
    refuse(features)
    layers = planned(model, task.tensor, config.parallel.tensor)
    shares = shares_of(task, model, parts)
    recompute(model, train.recompute)
    model.to(device, memory_format=memory_format_of(train))  # type: ignore[call-overload]
    judgement = judge(parts, device) if Feature.SHARD in features and ranks > 1 else None
    if judgement is not None:
        refuse(features | used({Feature.COUPLED: judgement.coupled}))
    tensors = state_of(model)
    described = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors.items()]
    require_same_model(world.everyone, described, "tensors")
    broadcast(world.everyone, list(tensors.values()), "receive the model")
    names = {id(parameter): plain_name(name) for name, parameter in model.named_parameters()}
    tensor, slots = uncut(), None
    if world.tensor.size > 1:  # one process that only tries the task has all of it
        updating = [part.optimizer for part in parts if type(part.optimizer) is not Together]  # which has others do it
        tensor = cut_model(model, layers, world.tensor, world.data, updating)
        slots = Slots(slices={place: tensor.slices[name] for place, name in names.items() if name in tensor.slices})
    sharding = None
    needs_norm = UpdateRule(train.clip_norm, LossScale() if train.precision == "fp16" else None).needs_norm
    if judgement is not None:
        sharding = share_out_optimizers(shares, parts, judgement, world.data, names)
        names |= sharding.names
    optimizer_state = OptimizerState(parts, names, sharding.slots if sharding else slots)
    if device.type != "cpu":
        optimizer_state.to_device()
    sparse = sparse_parameters(model, parts, config.reduce.sparse)
    reducers = ExchangesToChoose(
        {name: ShardedReducers(its, config.reduce, needs_norm, plain(parts)) for name, its in sharding.of.items()}
        if sharding is not None
        else {name: TorchReducers(share, config.reduce, share.those_of(sparse)) for name, share in shares.items()}
    )
    joint = SyncBatchNorm(model, world.data, clock) if joins and ranks > 1 else None
    ready = ReadyTask(
        task, model, shares, device, holdings, optimizer_state, reducers, choice.known(reducers), tensor, joint
    )
    framework = TorchFramework(ready, world, config, clock, choice)
    framework.reseed(0)
    return framework
