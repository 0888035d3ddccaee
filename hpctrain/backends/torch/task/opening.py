"""Opens a PyTorch task as a framework: checks it, moves its model to the device, and distributes it over ranks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing

import torch
from torch.nn import Module

from hpctrain.backends.joint_statistics import BatchNorms
from hpctrain.backends.named_state import plain_name, require_same_model
from hpctrain.backends.torch import accelerator
from hpctrain.backends.torch.device import Compute, compute_of, require_same_kind, stay_near
from hpctrain.backends.torch.performance import allows_tf32
from hpctrain.backends.torch.process_groups import (
    ProcessGroup,
    broadcast,
    by_group,
    peers_of,
    sum_exactly,
    use_shared_network,
)
from hpctrain.backends.torch.state.optimizer import OptimizerPart, OptimizerState
from hpctrain.backends.torch.state.tensors import layout_of, module_tensors, other_names, shared_buffers
from hpctrain.backends.torch.state.torch_state import Averages, TorchState, passes_leave
from hpctrain.backends.torch.steps.batch_metrics import BatchMetrics
from hpctrain.backends.torch.steps.own_step import OwnSteps, own_models
from hpctrain.backends.torch.steps.update_step import Modes, PlainForwardBackward, StepParts, UpdateStep
from hpctrain.backends.torch.steps.updates import OptimizerStep, ReducerFactoryByOptimizer
from hpctrain.backends.torch.strategies.listed import STRATEGIES
from hpctrain.backends.torch.strategies.parameter_traits import unsuited
from hpctrain.backends.torch.strategies.pipeline.pipelined import pipeline_features
from hpctrain.backends.torch.strategies.pipeline.stage_schedule import BY_PARAMETERS, StageChoice
from hpctrain.backends.torch.strategies.strategy import ParameterUpdates, PreparedModel, Strategy, StrategyContext
from hpctrain.backends.torch.strategies.tensor import has_dropout, tilings
from hpctrain.backends.torch.task.carried import carried_by
from hpctrain.backends.torch.task.checks import model_features, require_trainable
from hpctrain.backends.torch.task.extra_state import require_restorable
from hpctrain.backends.torch.task.gradient_hooks import require_linear_hooks
from hpctrain.backends.torch.task.shares import whole_model
from hpctrain.backends.torch.task.sync_batchnorm import SyncBatchNorm, wants_joint_statistics
from hpctrain.backends.torch.task.task_state import TaskState
from hpctrain.backends.torch.torch_framework import TorchEvaluator, TorchFramework
from hpctrain.backends.torch.torch_metrics import TorchMetricMeter, of_torchmetrics
from hpctrain.backends.update import rule_of
from hpctrain.comm.group import Group
from hpctrain.comm.world import World
from hpctrain.config.combinations import refuse
from hpctrain.config.features import Feature, used
from hpctrain.config.sections import TrainConfig
from hpctrain.errors import UserError
from hpctrain.reduce.reducer_choice import ChosenReducer, ReducerChoice
from hpctrain.tasks.definition import TorchTask, kept_objects
from hpctrain.tasks.meters import TorchMetric, copy_of_metric, meters_of, require_metrics
from hpctrain.train.clock import StepClock
from hpctrain.train.framework import StepSettings
from hpctrain.train.metrics import Meter


def open_torch(
    task: TorchTask,
    world: World,
    config: StepSettings,
    clock: StepClock,
    choice: ReducerChoice,
    stage_choice: StageChoice = BY_PARAMETERS,
    allocates: bool = True,
) -> TorchFramework:
    """Opens a framework whose model is on this rank's device and equal on all ranks. Collective.

    Args:
        task: the task.
        world: the ranks.
        config: settings of an update.
        clock: records the time of each phase.
        choice: chooses the reducer.
        stage_choice: how layers are distributed over pipeline stages.
        allocates: see device.Compute.

    Raises:
        UserError: the task cannot be trained, the ranks' models differ, or the configured reducer cannot be used.
    """
    train = config.train
    device = accelerator.pick(world.local_rank)
    require_same_kind(device, world)
    if device.type != "cpu":
        stay_near(device, world)
        use_shared_network(world, device)
        if config.reduce.exact:
            sum_exactly()
    if train.threads is not None:  # a supervisor sets it in the environment, but mpirun does not
        torch.set_num_threads(train.threads)
    set_kernels(train)
    compute = dataclasses.replace(compute_of(train, device), allocates=allocates)
    context = look_at(task, world, config, compute, clock, stage_choice)
    move(context.model, device, compute.memory_format)
    for module in context.task_state.modules_of_functions():
        if any(one.device.type != device.type for one in (*module.parameters(), *module.buffers())):
            module.to(device)  # quantized ones, which refuse this, are where they shall be
    strategies: list[Strategy] = [one for each in STRATEGIES if (one := each.planned(context)) is not None]
    with ExitStack() as stack:
        peers: ProcessGroup | None = None
        if world.data.size == world.size > 1 and by_group(config.reduce.kind, world, device):
            peers = stack.enter_context(closing(peers_of(world.data, device)))  # which reducers then share
        make_equal(context.model, world.everyone, peers)
        doubled = other_names(context.model)
        prepared = PreparedModel()
        for strategy in strategies:
            prepared = strategy(prepared)
        framework = assembled(context, prepared, choice, doubled)
    framework.reseed(0)
    return framework


def set_kernels(train: TrainConfig) -> None:
    """Sets how kernels compute and are chosen; leaves alone what the run file does not name, which a task may set."""
    if train.matmul is not None:
        torch.set_float32_matmul_precision("high" if train.matmul == "tf32" else "highest")
        torch.backends.cudnn.allow_tf32 = train.matmul == "tf32"
    if train.cudnn_benchmark:
        torch.backends.cudnn.benchmark = True


IN_FP32 = (
    "matrix products are computed in fp32, without this GPU's tensor cores: train.matmul: tf32 (factors of 10 bits) or "
    "train.precision: bf16 may be several times as fast; train.matmul: exact keeps fp32 and this line away"
)


ASLEEP = (
    "{} of the model is in evaluation mode and stays in it, so its dropout does nothing: transformers' from_pretrained "
    "returns models so; call .train() on it in the task if it shall drop"
)


def advice_on(train: TrainConfig, model: Module, device: torch.device) -> list[str]:
    """What a run leaves unused of its device and does not ask for."""
    is_fp32 = train.precision == "fp32" and any(one.dtype == torch.float32 for one in model.parameters())
    said = [ASLEEP.format(name) for name in asleep(model)[:1]]
    unasked = train.matmul is None and not allows_tf32()
    return said + [IN_FP32] * (is_fp32 and unasked and accelerator.has_tf32(device))


def asleep(model: Module) -> list[str]:
    """Outermost modules in evaluation mode, in a model that is not, that have weights to train and dropout to do."""
    found: list[str] = []
    for name, module in model.named_modules():
        is_inside = any(name.startswith(f"{other}.") for other in found)
        if model.training and not module.training and not is_inside and has_dropout(module):
            found += [name] if any(one.requires_grad for one in module.parameters()) else []
    return found


def look_at(
    task: TorchTask,
    world: World,
    config: StepSettings,
    compute: Compute,
    clock: StepClock,
    stage_choice: StageChoice,
) -> StrategyContext:
    """Checks a task and collects what strategies need. Raises UserError if it cannot be trained as configured."""
    model = whole_model(task)
    own = {"loss": task.loss, "forward": task.forward, "step": task.step}
    task_state = TaskState(task.optimizer, own, model, [one.value for one in kept_objects(task)])
    parts = task_state.parts()
    require_trainable(model, [part.optimizer for part in parts])
    require_restorable(model)
    require_linear_hooks(model)
    joins = wants_joint_statistics(model, config.train.sync_batchnorm)
    features = config.features() | model_features(model, parts, joins, world.data.size, unsuited(parts, task_state))
    features |= used({Feature.CARRIED: carried_by(task), Feature.TORCH_METRICS: of_torchmetrics(task)})
    features |= {**pipeline_features(task, task_state), **task.own_features}
    on_meta = parameters_on_meta(model, parts)
    features |= used({Feature.META_INIT: next(iter(on_meta), None)})
    refuse(features)
    return StrategyContext(
        task=task,
        world=world,
        config=config,
        compute=compute,
        clock=clock,
        model=model,
        task_state=task_state,
        parts=parts,
        features=features,
        joins=joins,
        meta_init=frozenset(on_meta),
        stage_choice=stage_choice,
    )


def make_equal(model: torch.nn.Module, everyone: Group, peers: ProcessGroup | None = None) -> None:
    """Broadcasts rank 0's weights, by ``peers`` if given. Raises UserError if the ranks' models differ. Collective."""
    tensors = {name: tensor for name, tensor, _ in module_tensors(model)}
    described = [
        (name, tuple(tensor.shape), str(tensor.dtype) + (" without values" if tensor.is_meta else ""))
        for name, tensor in tensors.items()
    ]
    require_same_model(everyone, described, "tensors")
    broadcast(everyone, [one for one in tensors.values() if not one.is_meta], "receive the model", peers)


def assembled(
    context: StrategyContext, prepared: PreparedModel, choice: ReducerChoice, doubled: Mapping[str, str]
) -> TorchFramework:
    """Assembles the framework of a prepared model. Collective.

    Args:
        context: the task and its model.
        prepared: the model as prepared by strategies.
        choice: chooses the reducer.
        doubled: further names of shared tensors, see ``other_names``.
    """
    task, model, device = context.task, context.model, context.compute.device
    train, partition, updates = context.config.train, prepared.partition, prepared.updates
    assert updates is not None, "of the last strategy, if not of one before"
    optimizer_state = OptimizerState(context.parts, updates.names, updates.slots)
    if device.type != "cpu":
        optimizer_state.to_device()
    averages = Averages(partition, model, updates.names, train.ema_decay)
    parts = step_parts(context, prepared, updates, choice, averages)
    loss = prepared.compile_loss(task.loss)
    forward_backward = (prepared.forward_backward or functools.partial(PlainForwardBackward, loss=loss))(parts)
    program: UpdateStep | OwnSteps = UpdateStep(parts, forward_backward)
    if task.step is not None:
        program = OwnSteps(parts, task.step, [part.optimizer for part in optimizer_state.every])
    evaluator = TorchEvaluator(parts, forward_backward, averages, meters_on(device, task))
    source = TorchState(
        parts=parts,
        program=program,
        optimizer_state=optimizer_state,
        averages=averages,
        task_state=context.task_state,
        tilings=tilings(model, task.tensor, plain_name),
        placed=prepared.placed,
        other_names=doubled,
        meta_init=context.meta_init,
        seed=context.config.seed,
        layout=layout_of(model, partition),
        shared=shared_buffers(model),
    )
    advice = [*advice_on(train, model, device), *prepared.advice]
    return TorchFramework(parts, program, evaluator, source, prepared, advice)


def step_parts(
    context: StrategyContext,
    prepared: PreparedModel,
    updates: ParameterUpdates,
    choice: ReducerChoice,
    averages: Averages,
) -> StepParts:
    """What step programs and evaluations share. Opens the reducer, unless it must be measured. Collective."""
    task, model, world, compute = context.task, context.model, context.world, context.compute
    train, partition = context.config.train, prepared.partition
    changes = task.step is not None or Feature.MAX_NORM in context.features
    unchanged = functools.partial(
        passes_leave, model, context.task_state, kept_objects(task), compute.device, with_parameters=changes
    )
    factory = ReducerFactoryByOptimizer(updates.reducers)
    reducers = ChosenReducer(factory, choice, unchanged, choice.known(factory))
    joins = context.joins and world.data.size > 1
    batch_norms = SyncBatchNorm(model, world.data, context.clock, compute.device) if joins else BatchNorms()
    optimizer_steps = {
        name: OptimizerStep(
            optimizer=task.optimizer[name] if name else task.optimizer,
            parameters=[parameter for _, parameter in share.pairs],
            average=averages.of([parameter for _, parameter in share.pairs]),
            train=train,
            rule=rule_of(train, name),
            total_norm=functools.partial(prepared.total_norm, partition),
            complete=prepared.complete,
            steps_ahead=compute.device.type != "cpu" and not prepared.is_collective,
        )
        for name, share in updates.shares.items()
    }
    return StepParts(
        task=task,
        model=model,
        models=own_models(task.model, prepared.compile_model),
        world=world,
        compute=compute,
        clock=context.clock,
        modes=Modes(model),
        partition=partition,
        batch_norms=batch_norms,
        optimizer_steps=optimizer_steps,
        reducers=reducers,
        unchanged=unchanged,
        metrics=training_metrics(task, world, compute, train.metrics) if train.metrics else None,
    )


def meters_on(device: torch.device, task: TorchTask) -> Mapping[str, Meter]:
    """The task's metrics that keep state."""
    adapt = functools.partial(TorchMetricMeter, device=device)
    return task.own_meters or meters_of(task.metrics, TorchMetric, "torchmetrics", adapt)


def training_metrics(task: TorchTask, world: World, compute: Compute, names: Sequence[str]) -> BatchMetrics:
    """Some of the task's metrics, for training batches. Raises UserError for names that it does not have."""
    require_metrics(names, task.metrics)
    some = dataclasses.replace(task, metrics={name: copy_of_metric(task.metrics[name]) for name in names})
    return BatchMetrics(compute, some.mean_metrics, meters_on(compute.device, some), counts=not world.tensor.rank)


def parameters_on_meta(model: Module, parts: Sequence[OptimizerPart]) -> list[str]:
    """Names of the parameters that are on the meta device.

    Raises UserError if buffers or optimizer state are, since a file might not contain them.
    """
    found = [plain_name(name) for name, parameter in model.named_parameters() if parameter.is_meta]
    buffer = next((name for name, one in model.named_buffers() if one.is_meta), None)
    if buffer is not None:
        raise UserError(
            f"the buffer {buffer} of the model has no values: the task made it on the meta device",
            'make buffers with values: torch.arange(n, device="cpu") in the module, or torch.device("meta") around '
            "layers that have none",
        )
    for part in parts:
        slots = (slot for state in part.optimizer.state.values() for slot in state.values())
        if any(isinstance(slot, torch.Tensor) and slot.is_meta for slot in slots):
            raise UserError(
                f"{type(part.optimizer).__name__} holds state from the start, and for parameters without values: the "
                "task made them on the meta device",
                "use an optimizer that makes its state in its first step, such as AdamW, or make the model with values",
            )
    return found


def move(model: Module, device: torch.device, memory_format: torch.memory_format) -> None:
    """Moves a model to a device; tensors on the meta device stay there."""
    if not any(parameter.is_meta for parameter in model.parameters()):
        model.to(device, memory_format=memory_format)  # type: ignore[call-overload]
        return
    model.to(memory_format=memory_format)  # type: ignore[call-overload]
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_meta:
            tensor.data = tensor.data.to(device)
