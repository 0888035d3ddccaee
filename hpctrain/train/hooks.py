"""What attaches to the loop: checkpoints, monitor, tracking, stop requests, and hooks of your own; and the run under
way as they see it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from hpctrain.comm.world import World
from hpctrain.train.clock import StepClock
from hpctrain.train.framework import Framework, StepResult
from hpctrain.train.metrics import Evaluation
from hpctrain.train.schedule import Duration, Schedule
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
    plan: Duration
    """How long the run is, and when it evaluates."""
    clock: StepClock
    """Where the time of a step goes: a hook may mark its own."""
    state: TrainState
    """How far it has come; read it, do not change it."""
    folder: Path = field(default=Path(), kw_only=True)
    """The run folder, for what hooks leave there."""
    evaluation: Evaluation = field(default_factory=Evaluation, kw_only=True)
    """The last one of this attempt."""


class StopReason(StrEnum):
    """Why a run, or an attempt at it, ended."""

    COMPLETED = "completed"
    """All steps are done."""
    EARLY = "early_stop"
    """The watched metric no longer improved."""
    REQUESTED = "stop_requested"
    """A signal, the STOP file or the time limit asked for it; a checkpoint was saved."""


@runtime_checkable
class Hook(Protocol):
    """Attaches to the training loop. Derive from ``BaseHook`` and override what you need.

    Collective rules:

    - Every method is called on every rank, from the main thread, at the same step, in the order in which the hooks
      were given. So a hook may use the collectives of ``training.world``'s groups, as long as every rank makes the
      same calls.
    - A reason to stop must be returned by all ranks at the same step: decide from what is equal on all ranks, such as
      the step or validation metrics, or agree by a collective first.
    - ``state_dict`` returns equal state on all ranks: rank 0's is saved. ``state_dict``, ``load_state_dict`` and
      ``close`` talk to no other rank.
    - An exception on one rank ends the run on all.
    """

    @property
    def name(self) -> str:
        """Under which the hook's state is saved: it must stay the same for as long as a run is resumed, and differ
        from the names of other hooks."""

    def before_fit(self, training: Training) -> StopReason | None:
        """The model is built, equal on all ranks and resumed, ``load_state_dict`` included; nothing has been trained
        in this attempt. A hook that has ended the run before returns its reason again; otherwise training continues.

        Args:
            training: the run, with the state that it begins or resumes from.

        Returns:
            A reason to end the run before its first step, or None.
        """

    def after_step(self, training: Training, result: StepResult) -> StopReason | None:
        """An update is done, and so is an evaluation that was due after it.

        Args:
            training: its ``state`` counts this update.
            result: loss and gradient norm of this update. Reading them may wait for the device.

        Returns:
            A reason to end the run here, or None.
        """

    def after_eval(self, training: Training, metrics: Mapping[str, float]) -> StopReason | None:
        """An evaluation is done.

        Args:
            training: its ``state`` counts the update before the evaluation.
            metrics: ``loss`` and the task's metrics by name, averaged over all validation samples, equal on all ranks.

        Returns:
            A reason to end the run here, or None.
        """

    def after_epoch(self, training: Training) -> StopReason | None:
        """The last update of an epoch is done, and all hooks have seen it by ``after_step``.

        Args:
            training: its ``state.epoch`` counts this epoch.

        Returns:
            A reason to end the run here, or None.
        """

    def after_hooks(self, training: Training) -> None:
        """All hooks have seen the step, and the epoch if it has ended. Checkpoints are made here: change no state that
        is saved.

        Args:
            training: its ``state`` counts this step's update.
        """

    def after_fit(self, training: Training, reason: StopReason) -> None:
        """The loop has ended in an orderly way. Change no state that is saved.

        Args:
            training: its ``state`` is the last one of this attempt.
            reason: why the loop has ended.
        """

    def state_dict(self) -> Mapping[str, Any]:
        """What a checkpoint keeps of this hook; empty if there is nothing to keep.

        Called before ``before_fit`` too, to check it, and whenever a checkpoint begins. It is copied before training
        continues.

        Returns:
            A dict of numbers, strings, bytes, None, NumPy arrays and the framework's tensors, and of dicts, lists and
            tuples of these.
        """

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Takes over what ``state_dict`` returned when the checkpoint was made, possibly at another number of ranks.

        Called before ``before_fit``, and only if the run is resumed from a checkpoint that has state of this hook.

        Args:
            saved: what ``state_dict`` returned, as copies that may be kept and changed.
        """

    def close(self) -> None:
        """Release threads and files. Also called after errors, when other ranks may be gone."""


class BaseHook:
    """A hook that does nothing and has no state; its name is that of its class."""

    @property
    def name(self) -> str:
        """The name of the class: override it to rename the class later."""
        return type(self).__name__

    def before_fit(self, training: Training) -> StopReason | None:
        """Does nothing."""

    def after_step(self, training: Training, result: StepResult) -> StopReason | None:
        """Does nothing."""

    def after_eval(self, training: Training, metrics: Mapping[str, float]) -> StopReason | None:
        """Does nothing."""

    def after_epoch(self, training: Training) -> StopReason | None:
        """Does nothing."""

    def after_hooks(self, training: Training) -> None:
        """Calls ``end_step``, its name in version 0.2, if a hook has it."""
        if type(self).end_step is not BaseHook.end_step:
            what = f"{type(self).__name__}.end_step is called after_hooks since hpctrain 0.3: rename it"
            warnings.warn(what, DeprecationWarning, stacklevel=2)
            self.end_step(training)

    def end_step(self, training: Training) -> None:
        """Does nothing; the former name of ``after_hooks``."""

    def after_fit(self, training: Training, reason: StopReason) -> None:
        """Does nothing."""

    def state_dict(self) -> Mapping[str, Any]:
        """No state."""
        return {}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Takes over nothing."""

    def close(self) -> None:
        """Nothing to release."""


class RateHook(BaseHook):
    """A hook that has a say in the learning rate."""

    def adjusted(self, schedule: Schedule) -> Schedule:
        """What the loop asks for the rate, in place of the run's schedule.

        Args:
            schedule: the run's, as hooks before this one have adjusted it. schedule(step) is the factor on the
                optimizer's own rate for the update after ``step`` done ones.

        Returns:
            The same kind of function; it may return a sequence of factors, one for each parameter group (PyTorch).
        """
        return schedule


def first_reason(reasons: Sequence[StopReason | None]) -> StopReason | None:
    """The first reason that is one."""
    return next((reason for reason in reasons if reason is not None), None)


def rate_hook(hooks: Sequence[Hook]) -> str | None:
    """The class of the first that has a say in the learning rate, if there is one."""
    return next((type(hook).__name__ for hook in hooks if isinstance(hook, RateHook)), None)
