"""The hysteresis of all ranks at once: arrays in place of one object a rank, so that a window costs O(ranks)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpctrain.monitor.window import CAUSES

Mask = NDArray[np.bool_]
Ranks = NDArray[np.int64]


@dataclass(frozen=True)
class Changes:
    """Ranks whose standing one window changed."""

    suspected: Ranks
    confirmed: Ranks
    cleared: Ranks


class Accused:
    """Who is suspected or confirmed to be slow; the rules are those of `finding.Hysteresis`.

    Args:
        ranks: number of ranks of the run.
        confirm_after: bad windows in a row.
        clear_after: calm windows in a row.
    """

    def __init__(self, ranks: int, confirm_after: int, clear_after: int) -> None:
        self.confirm_after = confirm_after
        self.clear_after = clear_after
        self.bad = np.zeros(ranks, dtype=np.int32)
        self.calm = np.zeros(ranks, dtype=np.int32)
        self.confirmed = np.zeros(ranks, dtype=bool)
        """[N] those who are named."""
        self.extra = np.zeros((ranks, len(CAUSES)))
        """[N, len(CAUSES)] seconds by which phases exceeded the peers', summed up while it lasts."""

    def observe(self, ranks: Ranks, slow: Mask, calm: Mask, extra: NDArray[np.floating]) -> Changes:
        """Takes in a window.

        Args:
            ranks: [R] which ranks it holds; the others keep their standing.
            slow: [R] bad ones.
            calm: [R] those far from it; a rank may be neither.
            extra: [number of slow ranks, len(CAUSES)] seconds by which their phases exceed the peers'.
        """
        self.extra[ranks[slow]] += extra
        self.bad[ranks] = np.where(slow, self.bad[ranks] + 1, 0)
        self.calm[ranks] = np.where(calm & ~slow, self.calm[ranks] + 1, 0)
        named, bad = self.confirmed[ranks], self.bad[ranks]
        cleared = ranks[named & (self.calm[ranks] >= self.clear_after)]
        confirmed = ranks[~named & (bad >= self.confirm_after)]
        suspected = ranks[~named & (bad == 1) & (bad < self.confirm_after)]
        self.confirmed[cleared] = False
        self.confirmed[confirmed] = True
        self.extra[ranks[~self.confirmed[ranks] & ~slow]] = 0
        return Changes(suspected, confirmed, cleared)
