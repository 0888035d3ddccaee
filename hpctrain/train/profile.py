"""Profiles some steps of some ranks with the framework's own profiler."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from hpctrain.config.sections import ProfileConfig
from hpctrain.train.framework import StepResult
from hpctrain.train.hooks import BaseHook, StopReason, Training

STEPS = 5
"""Steps that are profiled if no last one is given."""


class Profiler(Protocol):
    """Of a framework; one recording at a time."""

    def start(self, target: Path) -> None:
        """Begins a recording. Where its trace goes: a path in an existing folder, without a suffix."""

    def stop(self) -> None:
        """Ends it and writes the trace. Raises OSError."""

    def abandon(self) -> None:
        """Ends it, if there is one, and writes nothing that is not written."""


class Profile(BaseHook):
    """Starts and stops a profiler at the steps of ``track.profile``.

    Args:
        config: which steps and ranks; ``first_step`` is given.
        profiler: the framework's.
        warn: tells the user that a trace could not be written; training continues.
    """

    def __init__(self, config: ProfileConfig, profiler: Profiler, warn: Callable[[str], None]) -> None:
        self.ranks = config.ranks
        self.first = config.first_step or 1
        self.last = config.last_step or self.first + STEPS - 1
        self.profiler = profiler
        self.warn = warn
        self.records = False

    def before_fit(self, training: Training) -> None:
        self._look(training)

    def after_step(self, training: Training, result: StepResult) -> StopReason | None:
        self._look(training)
        return None

    def after_fit(self, training: Training, reason: StopReason) -> None:
        """A run that ends between the two steps leaves what it has."""
        self._stop()

    def close(self) -> None:
        self.profiler.abandon()

    def _look(self, training: Training) -> None:
        """Between two steps."""
        done, rank = training.state.step, training.world.rank
        if self.records and done >= self.last:
            self._stop()
        elif not self.records and rank in self.ranks and self.first <= done + 1 <= self.last:
            try:
                folder = training.folder / "profile"
                folder.mkdir(parents=True, exist_ok=True)
                self.profiler.start(folder / f"rank-{rank:05d}-from-step-{done + 1:09d}")
                self.records = True
            except OSError as error:
                self.warn(f"no profile: {error.strerror or error}; training continues")
                self.ranks = ()

    def _stop(self) -> None:
        if self.records:
            self.records = False
            try:
                self.profiler.stop()
            except OSError as error:
                self.warn(f"the profile could not be written: {error.strerror or error}; training continues")
