"""State kept from earlier windows: each rank's baseline from the start of the run, and long pauses in single steps."""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import NamedTuple

import numpy as np

from hpctrain.monitor.chief import slowness
from hpctrain.monitor.chief.peers import Peers
from hpctrain.monitor.window import CAUSES, Window
from hpctrain.system.array_types import Bools, Ints, Reals

WARM_UP = 1
"""Windows ignored at the start: compilation, caches and connections distort them."""
LEARNED = 4
"""Windows that form the baseline, which is then frozen."""


class Baseline:
    """Medians of the first windows after the warm-up. Windows with missing ranks are skipped.

    Args:
        ranks: number of ranks of the run.
        peers: which ranks are compared.
    """

    def __init__(self, ranks: int, peers: Peers) -> None:
        self.ranks = ranks
        self.peers = peers
        self.everyone = np.arange(ranks)
        self.seen = 0
        self.learned: list[tuple[Window, Reals]] = []
        """Windows, and the ranks' medians in them."""
        self.busy: Reals | None = None
        """[N] typical busy seconds of each rank, once learned."""
        self.noise: Reals | None = None
        """[N] noise of each rank: largest deviation of its excess in a learned window from the median over them."""
        self.typical: Reals | None = None
        """[N, len(CAUSES)] typical seconds per step in each phase."""
        self.work = self.transfer = self.step = 0.0

    def learn(self, window: Window, medians: Reals) -> None:
        """Adds a window to the baseline unless it is frozen."""
        if self.busy is not None or len(window.ranks) != self.ranks:
            return
        self.seen += 1
        if self.seen <= WARM_UP:
            return
        self.learned.append((window, medians))
        if len(self.learned) < LEARNED:
            return
        windows, rows = zip(*self.learned, strict=True)
        self.busy = np.median(rows, axis=0)
        self.typical = np.median([one.typical for one in windows], axis=0)
        self.work = statistics.median(float(np.median(one.work)) for one in windows)
        self.transfer = statistics.median(slowness.transfer_seconds(one.wait) for one in windows)
        self.step = statistics.median(slowness.step_seconds(one.busy, one.wait) / one.steps for one in windows)
        excesses = np.array([self.peers.excess(row, self.everyone, self.busy) for row in rows])
        self.noise = np.abs(excesses - np.median(excesses, axis=0)).max(axis=0)
        self.learned.clear()

    def growth(self, window: Window, medians: Reals) -> Reals | None:
        """[R] ratio of busy time to the baseline, for equal work; None while there is no baseline."""
        if self.busy is None:
            return None
        more_work = max(1.0, float(np.median(window.work)) / self.work) if self.work > 0 else 1.0
        return np.asarray(medians / np.maximum(self.busy[window.ranks] * more_work, 1e-9))

    def excess(self) -> Reals | None:
        """[N] fraction by which each rank exceeded its peers at the start of the run."""
        return None if self.busy is None else self.peers.excess(self.busy, self.everyone, self.busy)

    def fell_behind(self, medians: Reals, growth: Reals | None, slow: float) -> Bools:
        """[N] ranks that have slowed down, and more than their peers have; none while there is no baseline.

        Used for two or three ranks, where the median of the others cannot distinguish a slow rank from a fast peer.
        """
        if growth is None or self.busy is None or self.noise is None or len(medians) != self.ranks:
            return np.zeros(len(medians), dtype=bool)
        before = 1 + self.peers.excess(self.busy, self.everyone, self.busy)
        gained = (1 + self.peers.excess(medians, self.everyone, self.busy)) / before - 1
        return (growth >= 1 + slow) & (gained >= np.maximum(slow, 2 * self.noise))


REMEMBERED = 64
"""Windows over which pauses are counted."""
RECENT = 8
"""Last windows, which show whether pauses continue."""


class PausedWindow(NamedTuple):
    """The pauses of a window."""

    counts: Ints
    """[N] number."""
    seconds: Reals
    """[N] seconds lost to them."""
    total_s: float
    """Duration of the window."""


class Pauses:
    """Counts each rank's pauses and their cost.

    Args:
        ranks: number of ranks of the run.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.windows: deque[PausedWindow] = deque(maxlen=REMEMBERED)
        self.bursts = np.zeros((ranks, len(CAUSES)))
        """[N, len(CAUSES)] seconds per step in each phase beyond the typical step; newer windows weigh more."""

    def add(self, window: Window, busy: Reals) -> None:
        """Adds a window; ``busy`` holds its busy times corrected for work."""
        counts = np.zeros(self.ranks, dtype=np.int64)
        seconds = np.zeros(self.ranks, dtype=np.float32)
        counts[window.ranks], seconds[window.ranks] = slowness.pauses(busy)
        self.windows.append(PausedWindow(counts, seconds, slowness.step_seconds(window.busy, window.wait)))
        self.bursts *= 1 - 1 / RECENT
        self.bursts[window.ranks] += window.mean - window.typical

    def sums(self, windows: int) -> tuple[Ints, Reals]:
        """[N] number of pauses in the last ``windows`` windows, and [N] fraction of their time lost to pauses."""
        last = list(self.windows)[-windows:]
        total_s = max(math.fsum(one.total_s for one in last), 1e-9)
        counts = np.sum([one.counts for one in last], axis=0)
        return counts, np.sum([one.seconds for one in last], axis=0) / total_s

    def owners(self, least_cost: float, luck: float) -> set[int]:
        """Ranks whose pauses cost at least ``least_cost`` of the time and are not chance.

        Pauses are chance if ranks hit at random would show as many with a probability of ``luck`` or more.
        """
        found = set()
        for windows in (RECENT, REMEMBERED):
            counts, cost = self.sums(windows)
            for rank in np.flatnonzero(cost >= least_cost).tolist():
                chance = slowness.chance_of_so_many(int(counts[rank]), int(counts.sum()), self.ranks)
                if chance * self.ranks < luck:
                    found.add(rank)
        return found
