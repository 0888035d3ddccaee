"""Outer steps of local training: ranks train apart for some updates, then take a step along their mean progress.

With a rate of 1 and no momentum that is the mean of their weights (Local SGD, Stich 2019); with Nesterov's momentum it
is DiLoCo (Douillard et al. 2023). With overlap a round's progress travels during the next round and lands at its end;
until then each rank is ahead of the outer weights by its own progress.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.comm.group import Group

WHAT = "exchange the progress of a round"
AS_FAST = 0.9
"""Of the fastest one's speed: who reaches it makes all updates, as noise in what was measured may be as large."""

Flat = NDArray[Any]


class OuterStep:
    """Outer weights, equal on all ranks, and what is on its way to them.

    Args:
        group: the ranks, on a communicator that nothing else uses.
        weights: that training begins with, equal on all ranks; one-dimensional, of float32 or float64.
        rate, momentum: of the outer steps.
        overlap: whether progress lands a round later.
    """

    def __init__(self, group: Group, weights: Flat, rate: float, momentum: float, overlap: bool) -> None:
        self.group, self.rate, self.momentum, self.overlap = group, rate, momentum, overlap
        self.outer = weights.copy()
        self.velocity = np.zeros_like(weights) if momentum else weights[:0].copy()
        self.ahead = np.zeros_like(weights) if overlap else weights[:0].copy()
        """This rank's progress that has not landed."""
        self.coming = np.zeros_like(weights) if overlap else weights[:0].copy()
        """The mean of all ranks', once ``arrived`` has returned."""
        self.arrived: Callable[[bool], bool] = lambda wait: True

    def begin(self, weights: Flat) -> None:
        """Training apart begins from these weights, equal on all ranks."""
        self.outer[:] = weights
        for array in (self.velocity, self.ahead, self.coming):
            array[:] = 0

    def start(self) -> Flat:
        """The weights of this rank at the beginning of the round."""
        return self.outer + self.ahead if self.overlap else self.outer.copy()

    def end_round(self, weights: Flat, lands: bool = False) -> Flat:
        """The weights that this rank continues from. Collective.

        Args:
            weights: that this rank has reached.
            lands: whether nothing may be under way any more, as at the end of a run.
        """
        progress = weights - self.start()
        if not self.overlap:
            self.group.add(progress, WHAT)
            self._step(progress / self.group.size)
            return self.outer.copy()
        self.settle()
        self._step(self.coming)
        self.ahead[:] = progress
        self.coming[:] = progress
        self.coming /= self.group.size
        self.arrived = self.group.begin_add(self.coming, WHAT)
        if lands:
            self.settle()
            self._step(self.coming)
            self.ahead[:] = self.coming[:] = 0
        return self.start()

    def settle(self) -> None:
        """Waits for what is on its way, which then is state like everything else."""
        self.arrived(True)

    def _step(self, progress: Flat) -> None:
        if not self.momentum:
            self.outer += self.rate * progress
            return
        self.velocity *= self.momentum
        self.velocity += progress
        self.outer += self.rate * (progress + self.momentum * self.velocity)


class Pace:
    """Which updates of a round this rank makes; see sync.by_speed. All are made until speeds are known.

    Args:
        group: the ranks, on a communicator that nothing else uses.
        index: of those that this rank exchanges gradients with, and keeps pace with.
        every_steps: updates of a round.
    """

    def __init__(self, group: Group, index: int, every_steps: int) -> None:
        self.group, self.index, self.every_steps = group, index, every_steps
        self.updates = np.zeros(group.size, np.int64)
        """Of a round, by rank; 0 until they are known. State of a run."""
        self.seconds: list[float] = []
        """That updates of this rank took."""

    def is_due(self, position: int) -> bool:
        """Whether this rank makes an update of a round, from 1; it always makes the last one."""
        updates = int(self.updates[self.group.rank]) or self.every_steps
        return position * updates // self.every_steps > (position - 1) * updates // self.every_steps

    def load(self, updates: NDArray[np.int64]) -> None:
        """Takes the paces of a checkpoint, if ranks are as many. Collective: those that exchange gradients now may be
        on other nodes than before, and need the same one."""
        if len(updates) != len(self.updates):
            self.updates[:] = 0
            return
        index = self.group.gather(np.array([float(self.index)]), "learn who keeps pace")[:, 0]
        self.updates[:] = [updates[index == own].min() for own in index]

    def end_round(self) -> None:
        """Settles the paces, if they are not known. Collective."""
        if not self.updates.any():
            mine = np.array([self.index, statistics.median(self.seconds or [0.0])])
            everyone = self.group.gather(mine, "compare their speeds")
            self.updates[:] = updates_by_speed(everyone[:, 0], everyone[:, 1], self.every_steps)
        self.seconds.clear()


def updates_by_speed(index: Flat, seconds: Flat, every_steps: int) -> NDArray[np.int64]:
    """Updates of a round by rank: what it can make while the fastest makes all of them, and one at least.

    Args:
        index: by rank; those of equal index are as fast as the slowest of them.
        seconds: an update takes, by rank.
        every_steps: updates of a round.
    """
    slowest = np.array([seconds[index == own].max() for own in index])
    speed = np.ones_like(slowest) if slowest.min() <= 0 else slowest.min() / slowest
    return np.where(speed < AS_FAST, np.maximum(1, speed * every_steps), every_steps).astype(np.int64)
