"""Turns the rows that clocks write into per-rank times over a window of steps. Pure functions over arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpctrain.system.array_types import Floats, Ints
from hpctrain.train.clock import Phase

REST = len(Phase)
"""Column of the time that no phase claimed (hand-written loops)."""
GC = REST + 1
"""Column of Python's garbage collection; it is part of the other columns and is not added to them."""
WORK = GC + 1
"""Column of the amount of work: samples or tokens."""
ENDED = WORK + 1
"""Column of the time at which the step ended."""
COLUMNS = ENDED + 1

CAUSES = (*(phase.name.lower() for phase in Phase), "rest", "gc")
"""Names of the time columns, in order."""

AFTER_EXIT = (Phase.OPTIMIZER, Phase.CALLBACKS, Phase.CHECKPOINT)
"""Phases that follow the exchange: their time delays the arrival at the NEXT exchange."""
BUSY = tuple(column for column in range(GC) if column != Phase.EXCHANGE)
"""Columns that add up to a rank's busy time."""

ARRAYS = ("busy", "wait", "work", "typical", "mean")
"""Names of a window's times."""

Singles = NDArray[np.float32]


@dataclass(frozen=True)
class Window:
    """Times of R ranks over the same S steps. Seconds, float32."""

    index: int
    """Window number; the window starts at step ``index * S`` of the attempt."""
    ranks: Ints
    """[R] rank numbers."""
    busy: Singles
    """[R, S] from leaving one exchange to arriving at the next."""
    wait: Singles
    """[R, S] from arriving at an exchange to leaving it."""
    work: Singles
    """[R, S] samples or tokens."""
    typical: Singles
    """[R, len(CAUSES)] median over the steps of the seconds in each phase."""
    mean: Singles
    """[R, len(CAUSES)] mean over the steps of the seconds in each phase."""

    @property
    def steps(self) -> int:
        """Number of steps, S."""
        return int(self.busy.shape[1])


def condense(index: int, ranks: Ints, rows: Floats) -> Window:
    """Builds a window from running totals.

    Args:
        index: number of the window.
        ranks: [R] which ranks.
        rows: [R, S + 2, COLUMNS] each rank's totals at the ends of the window's S steps and of the two steps before.
    """
    steps = np.diff(rows, axis=1)
    spent = steps[:, 1:, :WORK].copy()
    spent[:, :, AFTER_EXIT] = steps[:, :-1, AFTER_EXIT]
    return from_phases(index, ranks, spent, steps[:, 1:, WORK])


def from_phases(index: int, ranks: Ints, spent: Floats, work: Floats) -> Window:
    """Builds a window from the seconds in each phase between one exit and the next.

    Args:
        index: number of the window.
        ranks: [R] which ranks.
        spent: [R, S, len(CAUSES)] seconds.
        work: [R, S] samples or tokens.
    """
    return Window(
        index=index,
        ranks=ranks,
        busy=spent[:, :, BUSY].sum(axis=2).astype(np.float32),
        wait=spent[:, :, Phase.EXCHANGE].astype(np.float32),
        work=work.astype(np.float32),
        typical=np.median(spent, axis=1).astype(np.float32),
        mean=spent.mean(axis=1).astype(np.float32),
    )


def join(parts: list[Window]) -> Window:
    """Joins parts of a window from several nodes into one, in rank order."""
    ranks = np.concatenate([part.ranks for part in parts])
    order = np.argsort(ranks)

    def stacked(name: str) -> Singles:
        return np.concatenate([getattr(part, name) for part in parts])[order]

    return Window(index=parts[0].index, ranks=ranks[order], **{name: stacked(name) for name in ARRAYS})
