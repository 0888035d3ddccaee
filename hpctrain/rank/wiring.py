"""From a run file to objects: the one place that knows which class implements what."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from hpctrain.checkpoint import checkpoint_hook
from hpctrain.comm.world import World
from hpctrain.config.combinations import WATCHED, refuse
from hpctrain.config.sections import Config
from hpctrain.data import (
    BatchSource,
    Dataset,
    Order,
    Samples,
    Stream,
    StreamingData,
    StreamOrder,
    TrainingData,
    ValidationData,
)
from hpctrain.data.order import first_draw
from hpctrain.data.samples import Collate, Recipe, make_batch
from hpctrain.errors import UserError
from hpctrain.monitor.rank.clock import RingClock
from hpctrain.monitor.rank.hook import MonitorHook
from hpctrain.parallel.stage_choice import BY_PARAMETERS, StageChoice
from hpctrain.rank.data_position import DataPosition
from hpctrain.rank.features import pieces_of, rate_features
from hpctrain.rank.kept_memory import KeptMemory
from hpctrain.rank.problem import Problem
from hpctrain.rank.stop_requests import StopRequests
from hpctrain.reduce.reducer_choice import ReducerChoice
from hpctrain.run.event_log import EventWriter
from hpctrain.run.folder import RunDir
from hpctrain.system.output import shown_columns
from hpctrain.tasks.definition import KerasTask, Task, TorchScheduler, TorchTask
from hpctrain.track.console import make_console
from hpctrain.track.events_hook import EventsHook
from hpctrain.track.mlflow import MlflowSink
from hpctrain.track.prometheus import PrometheusSink
from hpctrain.track.sink import Sink
from hpctrain.track.tensorboard import TensorBoardSink
from hpctrain.train.clock import StepClock
from hpctrain.train.early_stop import EarlyStop
from hpctrain.train.framework import Framework
from hpctrain.train.hooks import Hook, RateHook
from hpctrain.train.loop import Trainer
from hpctrain.train.plan import global_batch, make_plan
from hpctrain.train.plateau import Plateau
from hpctrain.train.profile import Profile, Profiler
from hpctrain.train.schedule import Schedule, make_schedule
from hpctrain.train.state import TrainState
from hpctrain.train.stateful import kept_state
from hpctrain.train.verify import VerifyWeights

if TYPE_CHECKING:
    from hpctrain.monitor.rank.session import Session as MonitorSession
    from hpctrain.rank.session import Session


def make_framework(
    config: Config,
    world: World,
    task: Task,
    clock: StepClock,
    choice: ReducerChoice | None = None,
    stages: StageChoice = BY_PARAMETERS,
) -> Framework:
    """The framework of a task's kind; on several ranks a collective call, after which all hold the same weights.

    ``choice`` says how its reducer is chosen; by default as the run file says. ``stages`` says how layers are shared
    out among stages; by default by their parameters.
    """
    choice = choice or ReducerChoice(config.reduce, world)
    if isinstance(task, TorchTask):
        from hpctrain.frameworks.torch.opening import open_torch

        framework = open_torch(task, world, config, clock, choice, stage_choice=stages)
        if framework.device.type == "cuda" and isinstance(clock, RingClock):
            from hpctrain.monitor.rank.torch_clock import follow_cuda

            follow_cuda(clock)
        return framework
    from hpctrain.frameworks.tensorflow.opening import open_keras

    assert isinstance(task, KerasTask), "load_task returns one of the two"
    return open_keras(task, world, config, clock, choice)


def make_validation(config: Config, world: World, dataset: Dataset, collate: Collate | None) -> ValidationData:
    """This rank's part of a dataset, by default in batches as large as one rank's micro-batches."""
    group = world.data
    share = config.train.eval_batch_per_rank
    if share is None:
        share = -(-global_batch(config.train, group.size) // (group.size * config.train.accumulate))
    return ValidationData(dataset, share, group.rank, group.size, config.data.prefetch_batches, collate)


def first_validation(config: Config, world: World, problem: Problem) -> list[Samples]:
    """The first samples of each set of validation data, the same on all ranks; one batch, of 32 samples at most."""
    collate, found = problem.task.collate, []
    for dataset in problem.validation.values():
        most = min(make_validation(config, world, dataset, collate).batch, len(dataset), 32)
        found.append(make_batch(dataset, Recipe(collate=collate), first_draw(np.arange(most))))
    return [batch for batch in found if batch]


def make_validation_sets(config: Config, world: World, problem: Problem) -> dict[str, ValidationData]:
    """This rank's part of each set."""
    collate = problem.task.collate
    return {name: make_validation(config, world, dataset, collate) for name, dataset in problem.validation.items()}


def make_hooks(
    config: Config,
    session: Session,
    run_dir: RunDir,
    problem: Problem,
    monitor: MonitorSession,
    more: Sequence[Hook] = (),
    sinks: Sequence[Sink] = (),
    fresh: bool = False,
    data: BatchSource | None = None,
) -> list[Hook]:
    """What attaches to the loop, in the order in which it is called: the end of a run is reported when it is saved.

    ``more`` and ``sinks`` are the caller's own; ``data`` is what is trained on, whose position is saved.
    """
    require_plain_names(config, problem.validation)
    refuse(rate_features(problem.task, more))
    world = session.world
    hooks: list[Hook] = []
    writer = EventWriter(run_dir.events, session.warn)
    hooks.append(StopRequests(session.signals, run_dir, writer.append))
    if config.reduce.verify_every_steps is not None:
        hooks.append(VerifyWeights(config.reduce.verify_every_steps, config.parallel.shard == "tables"))
    hooks.append(KeptMemory(session.warn))
    early_stop = [EarlyStop(config.train.early_stop)] if config.train.early_stop.metric is not None else []
    stateful = [*early_stop, *rate_hooks(config, problem.task), *problem.task.hooks, *more]
    stateful += [DataPosition(data)] if data is not None else []
    if config.checkpoint.enabled:
        batch, fingerprint = problem.order.global_batch, problem.fingerprint()
        state = kept_state(problem.task.state)
        report = writer.append
        hooks.append(checkpoint_hook(config, world, run_dir, batch, fingerprint, report, stateful, fresh, state))
    hooks += stateful  # behind what restores their state
    if config.track.profile.first_step is not None:
        hooks.append(Profile(config.track.profile, profiler_of(problem.task), session.warn))
    hooks.append(MonitorHook(monitor))
    all_sinks = [*make_sinks(config, session, run_dir), *(sinks if world.rank == 0 else ())]
    hooks.append(EventsHook(writer, monitor.clock, config.track.every_steps, all_sinks))
    return hooks


def rate_hooks(config: Config, task: Task) -> list[RateHook]:
    """What sets the learning rate and has state."""
    if config.schedule.kind == "plateau":
        return [Plateau(config.schedule.plateau, config.schedule.final_factor)]
    if not isinstance(task.schedule, TorchScheduler):
        return []
    from hpctrain.frameworks.torch.scheduler import SchedulerHook

    return [SchedulerHook(task.schedule, task.optimizer)]


def profiler_of(task: Task) -> Profiler:
    """The framework's own."""
    if isinstance(task, TorchTask):
        from hpctrain.frameworks.torch.profiler import TorchProfiler

        return TorchProfiler()
    from hpctrain.frameworks.tensorflow.profiler import KerasProfiler

    return KerasProfiler()


def require_plain_names(config: Config, validation: Iterable[str]) -> None:
    """Raises UserError if a metric that is watched is called by the name of the first set of validation data."""
    features, first = config.features(), next(iter(validation), None)
    for key, metric in ((feature, features[feature]) for feature in WATCHED if feature in features):
        if metric.startswith(f"{first}/"):
            raise UserError(
                f"{key} is {metric!r}, and metrics of the first set of validation data have plain names",
                f"write {key}: {metric.partition('/')[2]}",
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


def make_data(config: Config, world: World, problem: Problem, framework: Framework) -> BatchSource:
    """This rank's part of each global batch."""
    group, task = world.data, problem.task
    if isinstance(problem.train, Stream):
        assert isinstance(problem.order, StreamOrder), "make_problem gives a stream its order"
        return StreamingData(
            problem.train,
            problem.order,
            group.rank,
            group.size,
            accumulate=pieces_of(config, task),
            prefetch=config.data.prefetch_batches,
            recipe=Recipe(task.transform, task.collate, config.seed),
            place=framework.place,
        )
    assert isinstance(problem.order, Order), "make_problem gives a dataset its order"
    return TrainingData(
        problem.train,
        problem.order,
        group.rank,
        group.size,
        accumulate=pieces_of(config, task),
        prefetch=config.data.prefetch_batches,
        workers=config.data.workers,
        transform=task.transform,
        seed=config.seed,
        place=framework.place,
        collate=task.collate,
    )


def make_trainer(
    config: Config,
    world: World,
    problem: Problem,
    framework: Framework,
    clock: StepClock,
    hooks: Sequence[Hook],
    data: BatchSource | None = None,
) -> Trainer:
    """Puts the pieces together; touches neither files nor other ranks."""
    group, order = world.data, problem.order
    plan = make_plan(config.train, order.batches_per_epoch)
    schedule: Schedule = make_schedule(
        config.schedule, order.global_batch, group.size, plan.total_steps, order.batches_per_epoch
    )
    if problem.task.schedule is not None and not isinstance(problem.task.schedule, TorchScheduler):
        schedule = problem.task.schedule
    for hook in hooks:
        schedule = hook.adjusted(schedule) if isinstance(hook, RateHook) else schedule
    return Trainer(
        world=world,
        framework=framework,
        data=data or make_data(config, world, problem, framework),
        validation=make_validation_sets(config, world, problem),
        schedule=schedule,
        plan=plan,
        clock=clock,
        hooks=hooks,
        state=TrainState(),
        folder=RunDir.for_config(config).path,
    )
