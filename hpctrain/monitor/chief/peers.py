"""Which ranks are compared with each other: those that have the same layers and the same part of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpctrain.monitor.chief import statistics
from hpctrain.run.grid import Grid

Array = NDArray[np.floating]
AXES = ("stage", "tensor")
Ranks = NDArray[np.int64]


@dataclass(frozen=True)
class Load:
    """A stage, or a part of the layers, and its load compared with the others."""

    axis: str
    """stage or tensor."""
    index: int
    excess: float
    """Share by which it takes longer than the others do on average."""
    cost: float
    """Share of the step that would be saved if all took the same time."""
    seconds: tuple[float, ...] = ()
    """Of each index on the axis."""


@dataclass(frozen=True)
class Move:
    """Layers that would be better off on a neighbouring stage."""

    layers: int
    begin: int
    """The stage that has them."""
    end: int
    """The one that should."""


class Peers:
    """The ranks of a run by the part of the model that they hold. All methods take values of a window's ranks.

    Peers have equal stages and tensor indexes. With one copy of the model there are no peers: each rank's times
    are then divided by its own baseline and compared with those of all other ranks.

    Args:
        grid: places of all ranks.
        few: up to this number of peers, their median is not a reference.
    """

    def __init__(self, grid: Grid, few: int) -> None:
        self.grid = grid
        numbers = np.arange(grid.ranks)
        self.cohort = numbers % grid.tensor + numbers // (grid.data * grid.tensor) * grid.tensor
        """[N] the same number for ranks that have the same of the model."""
        self.by_own_past = grid.data == 1 and not grid.is_plain
        self.group = np.zeros_like(self.cohort) if self.by_own_past else self.cohort
        """[N] the same number for ranks that are compared."""
        self.most_few = few

    def groups(self, ranks: Ranks) -> list[Ranks]:
        """Indexes of the window's ranks, by those that are compared."""
        number = self.group[ranks]
        return [np.flatnonzero(number == each) for each in np.unique(number)]

    def few(self, ranks: Ranks) -> NDArray[np.bool_]:
        """[R] ranks of which too few are compared for a median."""
        found = np.zeros(len(ranks), dtype=bool)
        for group in self.groups(ranks):
            found[group] = len(group) <= self.most_few
        return found

    def scale(self, ranks: Ranks, past: Array | None) -> Array | None:
        """[R] what times are divided by before they are compared; None if they cannot be compared yet.

        Args:
            ranks: [R] of the window.
            past: [N] typical busy seconds of each rank when the run began; None if that is not known yet.
        """
        if not self.by_own_past:
            return np.ones(len(ranks))
        return None if past is None else np.maximum(past[ranks], 1e-9)

    def excess(self, values: Array, ranks: Ranks, past: Array | None) -> Array:
        """[R] share by which each rank's value is above the median of its peers."""
        found = np.zeros(len(values))
        if (scale := self.scale(ranks, past)) is not None:
            for group in self.groups(ranks):
                if len(group) > 1:
                    found[group] = statistics.excess_of_each(values[group] / scale[group])
        return found

    def robust_z(self, medians: Array, busy: Array, ranks: Ranks, past: Array | None) -> Array:
        """[R] see ``statistics.robust_z``."""
        found = np.zeros(len(medians))
        if (scale := self.scale(ranks, past)) is not None:
            for group in self.groups(ranks):
                if len(group) > 1:
                    own = scale[group]
                    between = len(group) > self.most_few
                    found[group] = statistics.robust_z(medians[group] / own, busy[group] / own[:, None], between)
        return found

    def levelled(self, medians: Array, ranks: Ranks, past: Array | None) -> Array:
        """[R] medians as multiples of those of the rank's peers: what stages and parts have to do does not count."""
        found = np.ones(len(medians))
        if (scale := self.scale(ranks, past)) is not None:
            for group in self.groups(ranks):
                own = medians[group] / scale[group]
                found[group] = own / max(float(np.median(own)), 1e-9)
        return found

    def on(self, ranks: Ranks, axis: str, index: int) -> NDArray[np.bool_]:
        """[R] ranks that have this stage, or this part of the layers."""
        stage, tensor = np.divmod(self.cohort[ranks], self.grid.tensor)
        return np.asarray((stage if axis == "stage" else tensor) == index)

    def levels(self, medians: Array, ranks: Ranks, counts: NDArray[np.bool_]) -> dict[int, float]:
        """Seconds that each cohort takes, by its number: of half of its ranks at least, of those that count."""
        number = self.cohort[ranks]
        found = {}
        for each in np.unique(number[counts]).tolist():
            own = np.sort(medians[(number == each) & counts])
            found[each] = float(own[(len(own) - 1) // 2])
        return found


def heaviest(levels: Mapping[int, float], grid: Grid, step_s: float) -> Load | None:
    """The stage or part of the layers that holds up the others most; None if there is nothing to compare.

    Args:
        levels: seconds by cohort, see ``Peers.levels``.
        grid: of the run.
        step_s: seconds of a step.
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
        found.append(Load(axis, index, excess, cost, tuple(typical.tolist())))
    return max(found, key=lambda load: load.cost, default=None)


def evening(load: Load, layers: Mapping[int, int]) -> Move | None:
    """How many layers of the heaviest stage its lighter neighbour should have, taking them for equally long.

    Args:
        load: of stages.
        layers: how many each stage has; stages may be missing.

    Returns:
        None if that is not known, or no whole number of layers makes the longer of the two shorter.
    """
    begin, seconds = load.index, load.seconds
    beside = [stage for stage in (begin - 1, begin + 1) if 0 <= stage < len(seconds)]
    if not beside or layers.get(begin, 0) < 2:
        return None
    end = min(beside, key=lambda stage: seconds[stage])
    each = seconds[begin] / layers[begin]
    count = min(round((seconds[begin] - seconds[end]) / 2 / each), layers[begin] - 1)
    return Move(count, begin, end) if count > 0 else None
