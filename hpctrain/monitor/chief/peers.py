"""Decides which ranks are compared: those with the same pipeline stage and tensor index."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from hpctrain.monitor.chief import slowness
from hpctrain.run.grid import Grid
from hpctrain.system.array_types import Bools, Ints, Reals

AXES = ("stage", "tensor")


@dataclass(frozen=True)
class Load:
    """A pipeline stage or tensor index, and its load compared with the others."""

    axis: str
    """stage or tensor."""
    index: int
    excess: float
    """Fraction by which it takes longer than the mean of the others."""
    cost: float
    """Fraction of the step that would be saved if all took the same time."""


class Peers:
    """Groups the ranks of a run by the part of the model that they hold. Methods take values of a window's ranks.

    Peers have the same stage and tensor index. With a single copy of the model there are no peers: each rank's times
    are then divided by its own baseline and compared with those of all other ranks.

    Args:
        grid: places of all ranks.
        few: up to this number of peers, their median is not a reference.
    """

    def __init__(self, grid: Grid, few: int) -> None:
        self.grid = grid
        numbers = np.arange(grid.ranks)
        self.cohort = numbers % grid.tensor + numbers // (grid.data * grid.tensor) * grid.tensor
        """[N] equal for ranks that hold the same part of the model."""
        self.by_own_past = grid.data == 1 and not grid.is_plain
        self.group = np.zeros_like(self.cohort) if self.by_own_past else self.cohort
        """[N] equal for ranks that are compared."""
        self.most_few = few

    def groups(self, ranks: Ints) -> list[Ints]:
        """Indexes into the window's ranks, one array per group of compared ranks."""
        number = self.group[ranks]
        return [np.flatnonzero(number == each) for each in np.unique(number)]

    def few(self, ranks: Ints) -> Bools:
        """[R] ranks in groups too small for their median to be a reference."""
        found = np.zeros(len(ranks), dtype=bool)
        for group in self.groups(ranks):
            found[group] = len(group) <= self.most_few
        return found

    def compared(self, ranks: Ints, past: Reals | None) -> Iterator[tuple[Ints, Reals]]:
        """Groups of compared ranks, with the divisors of their times; none if they cannot be compared yet.

        Args:
            ranks: [R] ranks of the window.
            past: [N] typical busy seconds of each rank at the start of the run; None if not known yet.
        """
        if not self.by_own_past:
            scale: Reals = np.ones(len(ranks))
        elif past is None:
            return
        else:
            scale = np.maximum(past[ranks], 1e-9)
        yield from ((group, scale[group]) for group in self.groups(ranks))

    def excess(self, values: Reals, ranks: Ints, past: Reals | None) -> Reals:
        """[R] fraction by which each rank's value is above the median of its peers."""
        found = np.zeros(len(values))
        for group, scale in self.compared(ranks, past):
            if len(group) > 1:
                found[group] = slowness.excess_of_each(values[group] / scale)
        return found

    def robust_z(self, medians: Reals, busy: Reals, ranks: Ints, past: Reals | None) -> Reals:
        """[R] ``slowness.robust_z`` within each group."""
        found = np.zeros(len(medians))
        for group, scale in self.compared(ranks, past):
            if len(group) > 1:
                between = len(group) > self.most_few
                found[group] = slowness.robust_z(medians[group] / scale, busy[group] / scale[:, None], between)
        return found

    def levelled(self, medians: Reals, ranks: Ints, past: Reals | None) -> Reals:
        """[R] medians as multiples of the peers' median: differences between stages or tensor indexes drop out."""
        found = np.ones(len(medians))
        for group, scale in self.compared(ranks, past):
            own = medians[group] / scale
            found[group] = own / max(float(np.median(own)), 1e-9)
        return found

    def on(self, ranks: Ints, axis: str, index: int) -> Bools:
        """[R] ranks that have this stage or tensor index."""
        stage, tensor = np.divmod(self.cohort[ranks], self.grid.tensor)
        return np.asarray((stage if axis == "stage" else tensor) == index)

    def levels(self, medians: Reals, ranks: Ints, counts: Bools) -> dict[int, float]:
        """Seconds of each cohort, by number: the (lower) median over its ranks that count."""
        number = self.cohort[ranks]
        found = {}
        for each in np.unique(number[counts]).tolist():
            own = np.sort(medians[(number == each) & counts])
            found[each] = float(own[(len(own) - 1) // 2])
        return found


def heaviest(levels: Mapping[int, float], grid: Grid, step_s: float) -> Load | None:
    """Returns the stage or tensor index that holds up the others most; None if there is nothing to compare.

    Args:
        levels: seconds by cohort, see ``Peers.levels``.
        grid: places of the ranks.
        step_s: seconds per step.
    """
    found = []
    for axis, size in zip(AXES, (grid.pipeline, grid.tensor), strict=True):
        by_index: dict[int, list[float]] = {}
        for cohort, seconds in levels.items():
            stage, tensor = divmod(cohort, grid.tensor)
            by_index.setdefault(stage if axis == "stage" else tensor, []).append(seconds)
        if size < 2 or len(by_index) < size:
            continue
        typical = np.array([np.median(by_index[index]) for index in range(size)])
        index = int(np.argmax(typical))
        others = float(np.delete(typical, index).mean())
        cost = float(typical[index] - typical.mean()) / max(step_s, 1e-9)
        excess = float(typical[index]) / max(others, 1e-9) - 1
        found.append(Load(axis, index, excess, cost))
    return max(found, key=lambda load: load.cost, default=None)
