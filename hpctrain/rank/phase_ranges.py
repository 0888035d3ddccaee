"""Shows the phases of steps in a profile, as ranges with their names."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from hpctrain.monitor.ring_clock import MARKS, RingClock
from hpctrain.train.clock import Phase
from hpctrain.train.watchers import Profiler


class PhaseProfiler:
    """A profiler that also records phases, of which a clock learns only when they end.

    The range that follows a phase gets the name of the phase that followed it last time, so names are right from the
    second profiled step on.

    Args:
        profiler: the framework's.
        clock: the clock on which this rank marks phases.
    """

    def __init__(self, profiler: Profiler, clock: RingClock) -> None:
        self.profiler, self.clock = profiler, clock
        self.following = {phase: Phase((phase + 1) % len(Phase)) for phase in Phase}
        self.last = Phase.CHECKPOINT

    def start(self, target: Path) -> None:
        self.profiler.start(target)
        before = {name: getattr(self.clock, name) for name in MARKS}
        self.before = SimpleNamespace(**before)
        self.clock.follow(SimpleNamespace(**{**before, "mark": self.mark}))

    def mark(self, phase: int) -> None:
        """See StepClock."""
        self.before.mark(phase)
        self.following[self.last] = self.last = Phase(phase)
        self.profiler.show(self.following[self.last].name.lower())

    def show(self, name: str) -> None:
        self.profiler.show(name)

    def stop(self) -> None:
        self.leave()
        self.profiler.stop()

    def abandon(self) -> None:
        self.leave()
        self.profiler.abandon()

    def leave(self) -> None:
        """Gives the clock back."""
        self.clock.follow(self.before)
        self.profiler.show("")
