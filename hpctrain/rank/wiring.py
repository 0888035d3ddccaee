"""Builds objects from a run file: the one place that knows which class implements what."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from hpctrain.backends.local_training import LocalFramework, inner_world
from hpctrain.backends.torch.strategies.pipeline.stage_schedule import BY_PARAMETERS, StageChoice
from hpctrain.checkpoint.hook import checkpoint_hook
from hpctrain.checkpoint.resume_compat import identity_of
from hpctrain.comm.world import World
from hpctrain.config.combinations import refuse
from hpctrain.config.features import Feature
from hpctrain.config.sections import LARGEST_SEED, Config, MonitorConfig
from hpctrain.data.pipeline import BatchSource
from hpctrain.data.tokens import token_counter
from hpctrain.errors import UserError
from hpctrain.monitor.rank_monitor import MonitorHook
from hpctrain.monitor.ring_clock import RingClock
from hpctrain.rank.batches import DataPosition, make_data, make_validation_sets
from hpctrain.rank.kept_choices import KeptReducer
from hpctrain.rank.phase_ranges import PhaseProfiler
from hpctrain.rank.problem import Problem, rate_features
from hpctrain.rank.recovery_note import RecoveryNote
from hpctrain.rank.stop_requests import StopRequests
from hpctrain.reduce.reducer_choice import ReducerChoice
from hpctrain.run.event_log import EventWriter
from hpctrain.run.folder import RunDir
from hpctrain.run.rank_environment import current_attempt
from hpctrain.tasks.definition import KerasTask, Task, TorchScheduler, TorchTask
from hpctrain.tasks.load_task import code_of
from hpctrain.track.events_hook import EventsHook
from hpctrain.track.sink import Sink
from hpctrain.track.sinks import make_sinks
from hpctrain.train.clock import StepClock
from hpctrain.train.framework import Framework, StepSettings
from hpctrain.train.hooks import Hook, RateHook
from hpctrain.train.loop import Trainer
from hpctrain.train.schedule import Schedule, duration_of, make_schedule
from hpctrain.train.seeds import derive
from hpctrain.train.state import TrainState
from hpctrain.train.stateful import kept_state
from hpctrain.train.watchers import Profile, Profiler, VerifyWeights, unreported, watching

if TYPE_CHECKING:
    from hpctrain.backends.tensorflow.keras_framework import KerasFramework
    from hpctrain.backends.torch.collective_watch import CollectiveWatch
    from hpctrain.backends.torch.torch_framework import TorchFramework
    from hpctrain.monitor.rank_monitor import MonitorSession
    from hpctrain.rank.session import Session


def make_framework(
    config: Config,
    world: World,
    task: Task,
    clock: StepClock,
    reducer: KeptReducer = KeptReducer(),  # noqa: B008  frozen
    stages: StageChoice = BY_PARAMETERS,
) -> Framework:
    """Makes the framework for a task (PyTorch or Keras). Collective; afterwards all ranks have the same weights.

    ``reducer`` is an earlier attempt's choice. ``stages`` assigns layers to stages, by default by parameter count.
    """
    if config.sync.kind == "local" and world.size > 1:
        return make_local_framework(config, world, task, clock, reducer)
    choice = ReducerChoice(config.reduce, world, reducer.name, reducer.record)
    return open_framework(config, world, task, clock, choice, stages)


def make_local_framework(
    config: Config, world: World, task: Task, clock: StepClock, reducer: KeptReducer
) -> LocalFramework:
    """Makes the framework for local training, in which ranks or nodes train independently between synchronizations.

    Gradients of embedding tables are made dense, since their ranks change. No reducer is measured while ranks train
    apart, since they are not at the same point.
    """
    inner = inner_world(world, config.sync)
    compression = "none" if config.reduce.compression == "auto" else config.reduce.compression
    kind: Literal["mpi", "nccl"] = "nccl" if on_devices(config, world, task) else "mpi"
    apart = ReducerChoice(dataclasses.replace(config.reduce, kind=kind, compression=compression), inner)
    first = ReducerChoice(config.reduce, world, reducer.name, reducer.record) if config.sync.after_steps else apart
    index = world.node if config.sync.within == "node" else world.rank
    own = dataclasses.replace(
        config,
        seed=derive(config.seed, 2, index) % LARGEST_SEED,  # random numbers must differ between independent groups
        reduce=dataclasses.replace(config.reduce, sparse="densify"),
    )
    return LocalFramework(open_framework(own, inner, task, clock, first), world, inner, config.sync, apart)


def on_devices(config: Config, world: World, task: Task) -> bool:
    """Whether ranks exchange from device to device, by process groups of PyTorch. Collective."""
    if not isinstance(task, TorchTask):
        return False
    from hpctrain.backends.torch import accelerator
    from hpctrain.backends.torch.process_groups import by_group

    return by_group(config.reduce.kind, world, accelerator.pick(world.local_rank))


def open_framework(
    config: Config,
    world: World,
    task: Task,
    clock: StepClock,
    choice: ReducerChoice,
    stages: StageChoice = BY_PARAMETERS,
) -> TorchFramework | KerasFramework:
    """Makes the framework for a task, with gradients summed by the reducer that ``choice`` selects. Collective."""
    settings = StepSettings(config.train, config.parallel, config.reduce, config.seed, config.features())
    if isinstance(task, TorchTask):
        from hpctrain.backends.torch.task.opening import open_torch

        framework = open_torch(task, world, settings, clock, choice, stage_choice=stages)
        if framework.device.type != "cpu" and isinstance(clock, RingClock):
            from hpctrain.backends.torch.device import follow_device

            follow_device(clock, framework.device)
        return framework
    from hpctrain.backends.tensorflow.task.keras_opening import open_keras

    assert isinstance(task, KerasTask), "load_task returns one of the two"
    return open_keras(task, world, settings, clock, choice)


def watched_collectives(
    task: Task, monitor: MonitorSession, session: Session, config: MonitorConfig
) -> CollectiveWatch | None:
    """Starts to watch the collectives of PyTorch's process groups; None if there will be none, or no monitor."""
    if not (isinstance(task, TorchTask) and session.world.size > 1 and config.enabled):
        return None
    from hpctrain.backends.torch.collective_watch import watch_collectives

    return watch_collectives(monitor.clock, session.folder, session.world.rank, config)


def save_memory_when_full(framework: Framework, session: Session) -> None:
    """Has PyTorch write its memory blocks into the run folder when a GPU is out of memory."""
    if framework.facts.name == "torch":
        from hpctrain.backends.torch import accelerator

        device = framework.host.device  # type: ignore[attr-defined]
        path = session.folder.full_memory(current_attempt(), session.world.rank)
        accelerator.save_memory_when_full(device, path)


def make_hooks(
    config: Config,
    session: Session,
    problem: Problem,
    monitor: MonitorSession,
    more: Sequence[Hook],
    sinks: Sequence[Sink],
    fresh: bool,
    data: BatchSource,
) -> Iterator[Hook]:
    """Yields the loop's hooks in calling order: the end of a run is reported after it is saved.

    A generator, so that the caller can close each hook even if the next one cannot be made. ``more`` and ``sinks`` are
    the caller's own; ``data`` is the training data, whose position is saved.
    """
    require_watched(config.features(), problem.validation, problem.task)
    refuse(rate_features(problem.task, more))
    world, run_dir = session.world, session.folder
    writer = EventWriter(run_dir.events, session.warn)
    yield StopRequests(session.signals, run_dir, writer.append)
    if world.everyone.size > 1 and not config.parallel.gathers and config.sync.kind != "local":
        yield VerifyWeights(config.reduce.verify_every_steps)
    watch = watching(config.train.early_stop, config.schedule)
    profile: list[Hook] = []
    if config.track.profile.first_step is not None:
        profiler = PhaseProfiler(profiler_of(problem.task), monitor.clock)
        profile = [Profile(config.track.profile, profiler, session.warn)]
    stateful = [*watch, *scheduler_hooks(problem.task), *problem.task.hooks, *more, DataPosition(data, session.warn)]
    if config.checkpoint.enabled:
        batch = problem.order.global_batch
        fingerprint = problem.fingerprint()
        identity = identity_of(dataclasses.asdict(config), batch, fingerprint, problem.sources())
        identity["code"] = code_of(config.task)
        state = kept_state(problem.task.state)
        yield checkpoint_hook(config.checkpoint, identity, world, run_dir, writer.append, stateful, fresh, state)
    # Stateful hooks come after the checkpoint hook, which restores their state.
    yield from (*stateful, *profile, MonitorHook(monitor), RecoveryNote(run_dir, writer.append))
    all_sinks: list[Sink] = []
    events = EventsHook(writer, monitor.clock, config.track.every_steps, all_sinks, lambda: session.signals.insisted)
    yield events  # closes the sinks
    if world.rank == 0:
        all_sinks += make_sinks(config.track, run_dir, config.name)
        all_sinks += sinks


def scheduler_hooks(task: Task) -> list[RateHook]:
    """Returns the hook that steps a task's TorchScheduler, if it has one."""
    if not isinstance(task.schedule, TorchScheduler):
        return []
    from hpctrain.backends.torch.state.lr_scheduler import SchedulerHook

    return [SchedulerHook(task.schedule, task.optimizer)]


def profiler_of(task: Task) -> Profiler:
    """Returns the profiler of the task's framework."""
    if isinstance(task, TorchTask):
        from hpctrain.backends.torch.performance import TorchProfiler

        return TorchProfiler()
    from hpctrain.backends.tensorflow.keras_performance import KerasProfiler

    return KerasProfiler()


def reported(task: Task) -> list[str]:
    """Returns the names of the metrics that evaluations report; empty if only an evaluation can show them."""
    if isinstance(task, TorchTask):
        return ["loss", *task.metrics]
    from hpctrain.backends.keras.keras_compiled import reported as reported_by_keras

    assert isinstance(task, KerasTask), "load_task returns one of the two"
    return reported_by_keras(task)


WATCHED = (Feature.EARLY_STOP, Feature.BEST, Feature.PLATEAU)
"""Features whose value is the name of a metric."""


def require_watched(features: Mapping[Feature, Any], validation: Iterable[str], task: Task) -> None:
    """Raises UserError if a watched metric is not one of the task's, or has the prefix of the first validation set.

    Does not check metrics that are known only after the first evaluation, as with a Keras model's ``test_step``.
    """
    first = next(iter(validation), None)
    for key, metric in ((feature, features[feature]) for feature in WATCHED if feature in features):
        if metric.startswith(f"{first}/"):
            raise UserError(
                f"{key} is {metric!r}, and metrics of the first set of validation data have plain names",
                f"write {key}: {metric.partition('/')[2]}",
            )
        known = reported(task)
        if known and not any(f"/{name}/" in f"/{metric}/" for name in known):
            raise unreported(key, metric, known)


def make_trainer(
    config: Config,
    world: World,
    problem: Problem,
    framework: Framework,
    clock: StepClock,
    hooks: Sequence[Hook],
    data: BatchSource | None = None,
) -> Trainer:
    """Assembles the trainer; reads the notes of packed text, and does not communicate."""
    group, order = world.data, problem.order
    plan = duration_of(config.train, order.batches_per_epoch)
    schedule: Schedule = make_schedule(
        config.schedule, order.global_batch, group.size, plan.total_steps, order.batches_per_epoch
    )
    if problem.task.schedule is not None and not isinstance(problem.task.schedule, TorchScheduler):
        schedule = problem.task.schedule
    for hook in hooks:
        schedule = hook.adjusted(schedule) if isinstance(hook, RateHook) else schedule
    state = TrainState()
    if isinstance(framework, LocalFramework):
        framework.follow(state, plan.total_steps)
    return Trainer(
        world=world,
        framework=framework,
        data=data or make_data(problem, world, framework.host.place),
        validation=make_validation_sets(problem, world, framework.host.place),
        schedule=schedule,
        plan=plan,
        clock=clock,
        hooks=hooks,
        count_tokens=token_counter(problem.task.tokens, problem.train),
        state=state,
        folder=RunDir.of(config.name, config.run_dir).path,
    )
