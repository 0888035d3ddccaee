"""From a run file to objects: the one place that knows which class implements what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from hpctrain.checkpoint import checkpoint_hook
from hpctrain.comm.world import World
from hpctrain.config.sections import Config
from hpctrain.data import Dataset, Order, TrainingData, ValidationData, open_dataset
from hpctrain.data.samples import read_and_transform
from hpctrain.errors import UserError
from hpctrain.frameworks.seeding import seed_task
from hpctrain.frameworks.tensorflow import runtime
from hpctrain.monitor.rank.clock import RingClock
from hpctrain.monitor.rank.hook import MonitorHook
from hpctrain.rank.staged import staged_args
from hpctrain.rank.stop_requests import StopRequests
from hpctrain.reduce.reducer_choice import ReducerChoice
from hpctrain.run.event_writer import EventWriter
from hpctrain.run.folder import RunDir
from hpctrain.system.output import shown_columns
from hpctrain.tasks.definition import KerasTask, Task, TorchTask
from hpctrain.tasks.loading import load_task
from hpctrain.track.console import make_console
from hpctrain.track.events_hook import EventsHook
from hpctrain.track.mlflow import MlflowSink
from hpctrain.track.prometheus import PrometheusSink
from hpctrain.track.sink import Sink
from hpctrain.track.tensorboard import TensorBoardSink
from hpctrain.train.clock import StepClock
from hpctrain.train.early_stop import EarlyStop
from hpctrain.train.framework import Framework
from hpctrain.train.hooks import Hook
from hpctrain.train.loop import Trainer
from hpctrain.train.plan import global_batch, make_plan
from hpctrain.train.schedule import make_schedule
from hpctrain.train.state import TrainState
from hpctrain.train.verify import VerifyWeights

if TYPE_CHECKING:
    from hpctrain.monitor.rank.session import Session as MonitorSession
    from hpctrain.rank.session import Session


@dataclass(frozen=True)
class Problem:
    """What a task is made of, on this rank. Making it needs no other rank, so that each can fail by itself."""

    task: Task
    train: Dataset
    validation: Dataset | None
    order: Order
    """Of the training samples, over all ranks."""


def make_problem(config: Config, world: World) -> Problem:
    """Calls the user's task function and opens its data.

    Raises:
        UserError: the task or its data cannot be had; see ``load_task`` and ``open_dataset``.
    """
    seed = partial(seed_task, config.seed, config.train.precision, world.local_rank)
    runtime.set_environment(config.train.threads)
    with runtime.without_chatter():
        task = load_task(config.task, staged_args(config.task_args), world, seed)
    data = config.data
    train = open_dataset(task.train, allow_outside=data.allow_outside)
    make_weights(task, lambda: train, config.seed)
    order = Order(
        length=len(train),
        global_batch=global_batch(config.train, world.data.size),
        seed=config.seed,
        shuffle=data.shuffle,
        block_samples=data.block_samples,
        drop_last=data.drop_last,
    )
    validation = None
    if task.validation is not None:
        validation = open_dataset(task.validation, allow_outside=data.allow_outside)
    return Problem(task, train, validation, order)


def make_weights(task: Task, train: Callable[[], Dataset], seed: int) -> None:
    """Makes the weights of a Keras model that waits for its first batch, by a dry call on one sample of its data."""
    if isinstance(task, KerasTask):
        from hpctrain.frameworks.tensorflow.weights import dry_call, lacks_weights

        if lacks_weights(task.model):
            dry_call(task, read_and_transform(train(), task.transform, seed, epoch=0, ids=np.arange(1)))


def require_same_data(problem: Problem, world: World) -> None:
    """Raises UserError, on all ranks, where some of them read other training data than the rest. Collective."""
    prints = world.everyone.allgather(problem.train.fingerprint(), "compare their training data")
    others = [rank for rank, each in enumerate(prints) if each != prints[0]]
    if others:
        raise UserError(
            f"ranks {', '.join(map(str, others[:8]))} read other training data than rank 0",
            "look for old copies on node-local disks, and for task functions that draw data at random",
        )


def make_framework(
    config: Config, world: World, task: Task, clock: StepClock, choice: ReducerChoice | None = None
) -> Framework:
    """The framework of a task's kind; on several ranks a collective call, after which all hold the same weights.

    ``choice`` tells how its reducer is chosen; by default as the run file says.
    """
    choice = choice or ReducerChoice(config.reduce, world)
    if isinstance(task, TorchTask):
        from hpctrain.frameworks.torch.framework import open_torch

        framework = open_torch(task, world, config, clock, choice)
        if framework.device.type == "cuda" and isinstance(clock, RingClock):
            from hpctrain.monitor.rank.torch_clock import follow_cuda

            follow_cuda(clock)
        return framework
    from hpctrain.frameworks.tensorflow.framework import open_keras

    assert isinstance(task, KerasTask), "load_task returns one of the two"
    return open_keras(task, world, config, clock, choice)


def make_validation(config: Config, world: World, dataset: Dataset) -> ValidationData:
    """This rank's part of a dataset, in batches as large as one rank's micro-batches."""
    group = world.data
    share = -(-global_batch(config.train, group.size) // (group.size * config.train.accumulate))
    return ValidationData(dataset, share, group.rank, group.size, config.data.prefetch_batches)


def make_hooks(
    config: Config,
    session: Session,
    run_dir: RunDir,
    problem: Problem,
    monitor: MonitorSession,
    more: Sequence[Hook] = (),
    sinks: Sequence[Sink] = (),
    fresh: bool = False,
) -> list[Hook]:
    """What attaches to the loop, in the order in which it is called: the end of a run is told when it is saved.

    ``more`` and ``sinks`` are the caller's own.
    """
    refuse_metrics_of_nothing(config, problem)
    world = session.world
    hooks: list[Hook] = []
    writer = EventWriter(run_dir.events, session.warn)
    hooks.append(StopRequests(session.signals, run_dir, writer.append))
    if config.reduce.verify_every_steps is not None:
        hooks.append(VerifyWeights(config.reduce.verify_every_steps))
    stateful = [*([EarlyStop(config.train.early_stop)] if config.train.early_stop.metric is not None else []), *more]
    if config.checkpoint.enabled:
        batch, fingerprint = problem.order.global_batch, problem.train.fingerprint()
        hooks.append(checkpoint_hook(config, world, run_dir, batch, fingerprint, writer.append, stateful, fresh))
    hooks += stateful  # behind what restores their state
    hooks.append(MonitorHook(monitor))
    all_sinks = [*make_sinks(config, session, run_dir), *(sinks if world.rank == 0 else ())]
    hooks.append(EventsHook(writer, monitor.clock, config.track.every_steps, all_sinks))
    return hooks


def refuse_metrics_of_nothing(config: Config, problem: Problem) -> None:
    """Raises UserError where a validation metric is to be watched and there is no validation data."""
    watched = {
        "train.early_stop.metric": config.train.early_stop.metric,
        "checkpoint.best_metric": config.checkpoint.best_metric if config.checkpoint.enabled else None,
    }
    for key, metric in watched.items():
        if metric is not None and problem.validation is None:
            raise UserError(
                f"{key} is {metric!r}, but task {config.task} has no validation data",
                f"return TorchTask(..., validation=...), or remove {key}",
            )


def make_sinks(config: Config, session: Session, run_dir: RunDir) -> list[Sink]:
    """Who hears of the run's events, on rank 0."""
    if session.world.rank != 0:
        return []
    track = config.track
    sinks: list[Sink] = [make_console(shown_columns())]
    if track.tensorboard:
        sinks.append(TensorBoardSink(run_dir.path / "tensorboard"))
    if track.prometheus:
        sinks.append(PrometheusSink(track.prometheus, config.name))
    if track.mlflow:
        sinks.append(MlflowSink(run_dir, track.mlflow, track.mlflow_experiment))
    return sinks


def make_trainer(
    config: Config, world: World, problem: Problem, framework: Framework, clock: StepClock, hooks: Sequence[Hook]
) -> Trainer:
    """Puts the pieces together; touches neither files nor other ranks."""
    group, order, validation = world.data, problem.order, problem.validation
    plan = make_plan(config.train, order.batches_per_epoch)
    return Trainer(
        world=world,
        framework=framework,
        data=TrainingData(
            problem.train,
            order,
            group.rank,
            group.size,
            accumulate=config.train.accumulate,
            prefetch=config.data.prefetch_batches,
            workers=config.data.workers,
            transform=problem.task.transform,
            seed=config.seed,
            place=framework.place,
        ),
        validation=None if validation is None else make_validation(config, world, validation),
        schedule=make_schedule(
            config.schedule, order.global_batch, group.size, plan.total_steps, order.batches_per_epoch
        ),
        plan=plan,
        clock=clock,
        hooks=hooks,
        state=TrainState(),
    )
