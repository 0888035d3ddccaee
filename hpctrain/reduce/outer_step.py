"""Outer steps of local training: ranks train apart for some updates, then take a step along their mean progress.

With a rate of 1 and no momentum that is the mean of their weights (Local SGD, Stich 2019); with Nesterov's momentum it
is DiLoCo (Douillard et al. 2023). With overlap the weights travel in parts, one after the other, while ranks make
updates (Streaming DiLoCo, Douillard et al. 2025): one lands when the next one leaves, and what a rank has learned
meanwhile stays.
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
        parts: of the weights, that take turns on their way; 0: they are exchanged all at once.
    """

    def __init__(self, group: Group, weights: Flat, rate: float, momentum: float, parts: int) -> None:
        self.group, self.rate, self.momentum = group, rate, momentum
        self.outer = weights.copy()
        self.velocity = np.zeros_like(weights) if momentum else weights[:0].copy()
        self.length = -(-len(weights) // parts) if parts else 0
        self.ahead = np.zeros(self.length, weights.dtype)
        """This rank's progress in the part under way, which is ahead of the outer weights by it."""
        self.coming = self.ahead.copy()
        """The mean of all ranks', once ``arrived`` has returned."""
        self.under_way = np.zeros(2 if parts else 0, np.int64)
        """Bounds of that part; equal if there is none."""
        self.arrived: Callable[[bool], bool] = lambda wait: True

    def begin(self, weights: Flat) -> None:
        """Training apart begins from these weights, equal on all ranks."""
        self.outer[:] = weights
        for array in (self.velocity, self.ahead, self.coming, self.under_way):
            array[:] = 0

    def end_round(self, weights: Flat) -> Flat:
        """Exchanges all progress; the outer weights, from which this rank continues. Collective.

        Args:
            weights: that this rank has reached, with no part under way.
        """
        progress = weights - self.outer
        self.group.add(progress, WHAT)
        self._step(slice(None), progress / self.group.size)
        return self.outer.copy()

    @property
    def part(self) -> slice:
        """That is under way."""
        return slice(*self.under_way.tolist())

    @property
    def next_part(self) -> slice:
        """That leaves next."""
        begin = int(self.under_way[1]) % len(self.outer)
        return slice(begin, min(begin + self.length, len(self.outer)))

    def land(self, weights: Flat) -> Flat:
        """What this rank continues from in the part under way, which has arrived then. Collective.

        Args:
            weights: of this part, that this rank has reached.
        """
        self.settle()
        at, count = self.part, len(weights)
        since = weights - (self.outer[at] + self.ahead[:count])
        self._step(at, self.coming[:count])
        self.under_way[0] = self.under_way[1]
        landed: Flat = self.outer[at] + since
        return landed

    def leave(self, weights: Flat) -> None:
        """Sends the progress of the next part on its way. Collective.

        Args:
            weights: of this part, that this rank has reached.
        """
        at, count = self.next_part, len(weights)
        self.under_way[:] = at.start, at.stop
        self.ahead[:count] = weights - self.outer[at]
        self.coming[:count] = self.ahead[:count] / self.group.size
        self.arrived = self.group.begin_add(self.coming[:count], WHAT)

    def share_ahead(self, group: Group) -> None:
        """These ranks have the same weights from now on. Collective among them."""
        self.settle()
        group.add(self.ahead, WHAT)
        self.ahead /= group.size

    def settle(self) -> None:
        """Waits for what is on its way, which then is state like everything else."""
        self.arrived(True)

    def _step(self, at: slice, progress: Flat) -> None:
        if self.momentum:
            self.velocity[at] = self.momentum * self.velocity[at] + progress
            progress = progress + self.momentum * self.velocity[at]
        self.outer[at] += self.rate * progress


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
        return is_due(position, int(self.updates[self.group.rank]) or self.every_steps, self.every_steps)

    def load(self, updates: NDArray[np.int64]) -> None:
        """Takes the paces of a checkpoint, if ranks are as many."""
        self.updates[:] = updates if len(updates) == len(self.updates) else 0

    def agree(self) -> None:
        """Those that exchange gradients now may have been on other nodes before, and need one pace. Collective."""
        index = self.group.gather(np.array([float(self.index)]), "learn who keeps pace")[:, 0]
        self.updates[:] = [self.updates[index == own].min() for own in index]

    def end_round(self) -> None:
        """Settles the paces, if they are not known. Collective."""
        if not self.updates.any():
            mine = np.array([self.index, statistics.median(self.seconds or [0.0])])
            everyone = self.group.gather(mine, "compare their speeds")
            self.updates[:] = updates_by_speed(everyone[:, 0], everyone[:, 1], self.every_steps)
        self.seconds.clear()


def is_due(position: int, times: int, steps: int) -> bool:
    """Whether what is done N ``times`` in a round, evenly, is due at this place among its steps, from 1."""
    return position * times // steps > (position - 1) * times // steps


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
