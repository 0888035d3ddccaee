"""Hooks: the protocol by which checkpoints, monitoring, tracking, stop requests and your own code attach to the loop,
and the ``Training`` that they see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from hpctrain.comm.step_vote import Ballot
from hpctrain.comm.world import World
from hpctrain.train.clock import StepClock
from hpctrain.train.framework import Framework, StepResult
from hpctrain.train.metrics import Evaluation
from hpctrain.train.schedule import Duration, Schedule
from hpctrain.train.state import TrainState


@dataclass
class Training:
    """A run in progress, as hooks see it."""

    world: World
    """The ranks and their groups."""
    framework: Framework
    """The model on this rank's device."""
    schedule: Schedule
    """Maps the step to factors on the optimizer's own learning rates: one, or one per parameter group."""
    plan: Duration
    """How long the run is, and when it evaluates."""
    clock: StepClock
    """Step timing: a hook may mark its own phases."""
    state: TrainState
    """Position of the run; read it, do not change it."""
    folder: Path = field(default=Path(), kw_only=True)
    """The run folder, where hooks may write files."""
    tokens: int = field(default=0, kw_only=True)
    """Tokens that this rank has trained on in this attempt; 0 if nothing says what a token is."""
    is_asked_to_stop: bool = field(default=False, kw_only=True)
    """Whether time is short at the end, though the run may be complete."""
    evaluation: Evaluation = field(default_factory=Evaluation, kw_only=True)
    """The last evaluation in this attempt."""
    ballot: Ballot = field(init=False)
    """What ranks agree on between steps."""

    def __post_init__(self) -> None:
        self.ballot = Ballot(self.world.everyone)


class StopReason(StrEnum):
    """Why a run, or one attempt at it, ended."""

    COMPLETED = "completed"
    """All steps are done."""
    EARLY = "early_stop"
    """The watched metric stopped improving."""
    REQUESTED = "stop_requested"
    """A signal, the STOP file or the time limit requested it; a checkpoint was saved."""


@runtime_checkable
class Hook(Protocol):
    """Attaches to the training loop. Derive from ``BaseHook`` and override what you need.

    Collective rules:

    - Every method is called on every rank, from the main thread, at the same step, in the order in which the hooks
      were given. So a hook may use the collectives of ``training.world``'s groups, as long as every rank makes the
      same calls.
    - A reason to stop must be returned by all ranks at the same step: decide from values that are equal on all ranks,
      such as the step or validation metrics, or agree by a collective first.
    - ``state_dict`` returns equal state on all ranks: rank 0's is saved. ``state_dict``, ``load_state_dict`` and
      ``close`` must not communicate.
    - An exception on one rank ends the run on all.
    """

    @property
    def name(self) -> str:
        """Name under which the hook's state is saved: keep it the same as long as a run may be resumed, and different
        from the names of other hooks. By default the class name."""
        return type(self).__name__

    def before_fit(self, training: Training) -> StopReason | None:
        """Called before the first step, when the model is built, equal on all ranks and resumed, and
        ``load_state_dict`` was called. A hook that ended the run earlier returns its reason again, or None to continue
        training.

        Args:
            training: the run, with the state that it starts or resumes from.

        Returns:
            A reason to end the run before its first step, or None.
        """
        return None

    def after_step(self, training: Training, result: StepResult) -> StopReason | None:
        """Called after each update, and after the evaluation if one was due.

        Args:
            training: its ``state`` counts this update.
            result: loss and gradient norm of this update. Reading them may wait for the device.

        Returns:
            A reason to end the run here, or None.
        """
        return None

    def after_eval(self, training: Training, metrics: Mapping[str, float]) -> StopReason | None:
        """Called after each evaluation.

        Args:
            training: its ``state`` counts the update before the evaluation.
            metrics: ``loss`` and the task's metrics by name, averaged over all validation samples, equal on all ranks.

        Returns:
            A reason to end the run here, or None.
        """
        return None

    def after_epoch(self, training: Training) -> StopReason | None:
        """Called after the last update of an epoch, when all hooks' ``after_step`` have been called.

        Args:
            training: its ``state.epoch`` counts this epoch.

        Returns:
            A reason to end the run here, or None.
        """
        return None

    def after_hooks(self, training: Training) -> None:
        """Called when all hooks have seen the step, and the epoch if it ended. Checkpoints are made here: do not change
        saved state.

        Args:
            training: its ``state`` counts this step's update.
        """
        return

    def after_fit(self, training: Training, reason: StopReason) -> None:
        """Called when the loop has ended without an error. Do not change saved state.

        Args:
            training: its ``state`` is the last one of this attempt.
            reason: why the loop ended.
        """
        return

    def state_dict(self) -> Mapping[str, Any]:
        """Returns what a checkpoint keeps of this hook; empty if there is nothing to keep.

        Called before ``before_fit``, as a check, and whenever a checkpoint begins. The result is copied before training
        continues.

        Returns:
            A dict of numbers, strings, bytes, None, NumPy arrays and the framework's tensors, and of dicts, lists and
            tuples of these.
        """
        return {}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restores what ``state_dict`` returned when the checkpoint was made, possibly on a different number of ranks.

        Called before ``before_fit``, and only if the run resumes from a checkpoint with state of this hook.

        Args:
            saved: what ``state_dict`` returned, as copies that may be kept and changed.
        """
        return

    def close(self) -> None:
        """Releases threads and files. Also called after errors, when other ranks may be gone."""
        return


class BaseHook(Hook):
    """A hook that does nothing and has no state; its name is its class name."""


class RateHook(BaseHook):
    """A hook that can change the learning rate."""

    def adjusted(self, schedule: Schedule) -> Schedule:
        """Returns the schedule that the loop uses in place of the given one.

        Args:
            schedule: the run's schedule, as adjusted by earlier hooks. schedule(step) is the factor on the optimizer's
                own rate for the update after ``step`` updates.

        Returns:
            A function of the same kind; it may return a sequence of factors, one per parameter group (PyTorch).
        """
        return schedule


def first_reason(reasons: Sequence[StopReason | None]) -> StopReason | None:
    """The first reason that is not None."""
    return next((reason for reason in reasons if reason is not None), None)


def rate_hook(hooks: Sequence[Hook]) -> str | None:
    """Class name of the first hook that can change the learning rate, if any."""
    return next((type(hook).__name__ for hook in hooks if isinstance(hook, RateHook)), None)
