"""Long pauses in single steps, remembered over many windows: medians do not see them."""

from __future__ import annotations

import math
from collections import deque

import numpy as np
from numpy.typing import NDArray

from hpctrain.monitor.chief import statistics
from hpctrain.monitor.window import CAUSES, Window

Array = NDArray[np.floating]
Counts = NDArray[np.int64]

REMEMBERED = 64
"""Windows."""
RECENT = 8
"""Windows that show whether it still continues."""


class Pauses:
    """Who paused how often, and what it cost.

    Args:
        ranks: number of ranks of the run.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.windows: deque[tuple[Counts, Array, float]] = deque(maxlen=REMEMBERED)
        self.bursts = np.zeros((ranks, len(CAUSES)))
        """[N, len(CAUSES)] seconds a step of each phase beyond the typical step, newer windows counting more."""

    def add(self, window: Window, busy: Array) -> None:
        """Takes in a window. ``busy`` are its busy times corrected for work."""
        counts, seconds = np.zeros(self.ranks, dtype=np.int64), np.zeros(self.ranks, dtype=np.float32)
        counts[window.ranks], seconds[window.ranks] = statistics.pauses(busy)
        self.windows.append((counts, seconds, statistics.step_seconds(window.busy, window.wait)))
        self.bursts *= 1 - 1 / RECENT
        self.bursts[window.ranks] += window.mean - window.typical

    def sums(self, windows: int) -> tuple[Counts, Array]:
        """[N] pauses in the last windows, and [N] share of their time that was lost to them."""
        last = list(self.windows)[-windows:]
        total = max(math.fsum(total for _, _, total in last), 1e-9)
        return (
            np.sum([counts for counts, _, _ in last], axis=0),
            np.sum([seconds for _, seconds, _ in last], axis=0) / total,
        )

    def owners(self, least_cost: float, luck: float) -> set[int]:
        """Ranks whose pauses cost at least a share of the time and cannot be luck: changing ranks share them evenly."""
        found = set()
        for windows in (RECENT, REMEMBERED):
            counts, cost = self.sums(windows)
            for rank in np.flatnonzero(cost >= least_cost).tolist():
                chance = statistics.chance_of_so_many(int(counts[rank]), int(counts.sum()), self.ranks)
                if chance * self.ranks < luck:
                    found.add(rank)
        return found
