"""Outer steps of local training: ranks train separately for some updates, then step along their mean progress.

With a rate of 1 and no momentum this averages the weights (Local SGD, Stich 2019); with Nesterov momentum it is DiLoCo
(Douillard et al. 2023). With overlap, the weights are exchanged in parts, one after the other, during updates
(Streaming DiLoCo, Douillard et al. 2025): each part lands when the next one leaves, and keeps what the rank has learned
meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import numpy as np

from hpctrain.system.array_types import Array

WHAT = "exchange the progress of a round"

Flat: TypeAlias = Any
"""A one-dimensional float32 or float64 array: NumPy's, or a torch tensor, which may be on a GPU."""


class FlatSums(Protocol):
    """Sums of flat arrays over the ranks that make outer steps."""

    size: int
    """Number of ranks."""

    def array(self, values: Array) -> Flat:
        """Copies values to where sums are formed, in the dtype of the weights."""

    def begin_add(self, values: Flat, what: str) -> Callable[[bool], bool]:
        """Starts a sum in place; see Group.begin_add. On a GPU, what is called later waits for it, and not the host."""


class OuterStep:
    """Outer weights, equal on all ranks, and the progress being exchanged.

    Args:
        sums: over the ranks.
        weights: initial weights, equal on all ranks, which are not copied.
        rate, momentum: of the outer steps.
        parts: number of parts of the weights that are exchanged in turn; 0: all are exchanged at once.
    """

    def __init__(self, sums: FlatSums, weights: Flat, rate: float, momentum: float, parts: int) -> None:
        self.sums, self.rate, self.momentum = sums, rate, momentum
        self.ranks = sums.array(np.array([sums.size]))
        """Their number as an array: dividing by a Python number, torch multiplies by its rounded inverse on GPUs."""
        self.outer = weights
        self.velocity = sums.array(np.zeros(len(weights) if momentum else 0))
        self.length = -(-len(weights) // parts) if parts else 0
        self.ahead = sums.array(np.zeros(self.length))
        """This rank's progress in the part being exchanged, relative to the outer weights."""
        self.coming = sums.array(np.zeros(self.length))
        """The mean of all ranks' progress, once ``arrived(True)`` has returned."""
        self.under_way = np.zeros(2 if parts else 0, np.int64)
        """Bounds of the part being exchanged; equal if there is none."""
        self.arrived: Callable[[bool], bool] = lambda wait: True

    def begin(self, weights: Flat) -> None:
        """Restarts local training from these weights, equal on all ranks."""
        self.outer[:] = weights
        for array in (self.velocity, self.ahead, self.coming, self.under_way):
            array[:] = 0

    def end_round(self, weights: Flat) -> Flat:
        """Exchanges all progress; returns the outer weights, from which this rank continues: copy them. Collective.

        Args:
            weights: this rank's current weights, with no part being exchanged; they are overwritten.
        """
        weights -= self.outer
        self.sums.begin_add(weights, WHAT)(True)
        weights /= self.ranks
        self._step(slice(None), weights)
        return self.outer

    @property
    def part(self) -> slice:
        """The part being exchanged."""
        return slice(*self.under_way.tolist())

    @property
    def next_part(self) -> slice:
        """The part to be exchanged next."""
        begin = int(self.under_way[1]) % len(self.outer)
        return slice(begin, min(begin + self.length, len(self.outer)))

    def land(self, weights: Flat) -> Flat:
        """Finishes the exchange of a part; returns the values that this rank continues from in it. Collective.

        Args:
            weights: this rank's current weights of this part.
        """
        self.settle()
        at, count = self.part, len(weights)
        since = weights - (self.outer[at] + self.ahead[:count])
        self._step(at, self.coming[:count])
        self.under_way[0] = self.under_way[1]
        return self.outer[at] + since

    def leave(self, weights: Flat) -> None:
        """Starts to exchange the progress of the next part. Collective.

        Args:
            weights: this rank's current weights of that part.
        """
        at, count = self.next_part, len(weights)
        self.under_way[:] = at.start, at.stop
        self.ahead[:count] = weights - self.outer[at]
        self.coming[:count] = self.ahead[:count] / self.ranks
        self.arrived = self.sums.begin_add(self.coming[:count], WHAT)

    def settle(self) -> None:
        """Waits for the exchange under way, so that its result is ordinary state."""
        self.arrived(True)

    def _step(self, at: slice, progress: Flat) -> None:
        if self.momentum:
            self.velocity[at] *= self.momentum
            self.velocity[at] += progress
            progress = progress + self.momentum * self.velocity[at]
        self.outer[at] += self.rate * progress


def is_due(position: int, times: int, steps: int) -> bool:
    """Whether something done ``times`` times per round, spread evenly over its steps, is due at this one, from 1."""
    return position * times // steps > (position - 1) * times // steps
