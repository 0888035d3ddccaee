"""What attaches to the loop: checkpoints, monitor, tracking, stop requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Protocol

from hpctrain.train.framework import StepResult
from hpctrain.train.training import Training


class StopReason(StrEnum):
    """Why a run, or an attempt at it, ended."""

    COMPLETED = "completed"
    """All steps are done."""
    EARLY = "early_stop"
    """The watched metric no longer improved."""
    REQUESTED = "stop_requested"
    """A signal, the STOP file or the time limit asked for it; a checkpoint was saved."""


class Hook(Protocol):
    """All methods are called on every rank, at the same step, in the order in which hooks were given."""

    def before_fit(self, training: Training) -> StopReason | None:
        """The model is built and equal on all ranks; nothing has been trained in this attempt.

        A reason, on all ranks alike, ends the run before its first step.
        """

    def after_step(self, training: Training, result: StepResult) -> StopReason | None:
        """An update is done. A reason ends the run here; hooks must agree on it over all ranks by themselves."""

    def after_eval(self, training: Training, metrics: Mapping[str, float]) -> StopReason | None:
        """Validation metrics, averaged over all ranks."""

    def after_fit(self, training: Training, reason: StopReason) -> None:
        """The loop has ended in an orderly way."""

    def close(self) -> None:
        """Release threads and files; called after errors too."""


class BaseHook:
    """A hook that does nothing; override what is needed."""

    def before_fit(self, training: Training) -> StopReason | None:
        """See Hook."""
        return None

    def after_step(self, training: Training, result: StepResult) -> StopReason | None:
        """See Hook."""
        return None

    def after_eval(self, training: Training, metrics: Mapping[str, float]) -> StopReason | None:
        """See Hook."""
        return None

    def after_fit(self, training: Training, reason: StopReason) -> None:
        """See Hook."""

    def close(self) -> None:
        """See Hook."""


def first_reason(reasons: Sequence[StopReason | None]) -> StopReason | None:
    """The first reason that is one."""
    return next((reason for reason in reasons if reason is not None), None)
