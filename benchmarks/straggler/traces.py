"""Traces of the ranks' phases, slowdowns injected into them, and the resulting waits in a synchronous exchange."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hpctrain.monitor.window import CAUSES, GC, Window, from_phases
from hpctrain.train.clock import Phase

SHARES = {
    Phase.DATA: 0.05,
    Phase.TO_DEVICE: 0.02,
    Phase.FORWARD: 0.28,
    Phase.BACKWARD: 0.50,
    Phase.OPTIMIZER: 0.10,
    Phase.CALLBACKS: 0.04,
    Phase.CHECKPOINT: 0.01,
}
"""Fractions of a typical step by phase, for simulated traces."""


@dataclass(frozen=True)
class Trace:
    """Seconds that each rank spends by itself, without waiting.

    Args:
        spent: [N, K, len(CAUSES)] seconds of N ranks in K steps; the exchange column is ignored.
        work: [N, K] samples or tokens.
        transfer: seconds that an exchange takes once all ranks have arrived.
    """

    spent: NDArray[np.float64]
    work: NDArray[np.float64]
    transfer: float

    @property
    def ranks(self) -> int:
        """Number of ranks, N."""
        return int(self.spent.shape[0])

    @property
    def steps(self) -> int:
        """Number of steps, K."""
        return int(self.spent.shape[1])

    def busy(self) -> NDArray[np.float64]:
        """[N, K] seconds outside the exchange."""
        columns = [column for column in range(GC) if column != Phase.EXCHANGE]
        return np.asarray(self.spent[:, :, columns].sum(axis=2))

    def synchronised(self) -> NDArray[np.float64]:
        """``spent`` with exchange times that result when all ranks wait for the last one."""
        busy = self.busy()
        spent = self.spent.copy()
        spent[:, :, Phase.EXCHANGE] = busy.max(axis=0) - busy + self.transfer
        return spent

    def windows(self, steps: int = 32) -> Iterator[Window]:
        """Yields the trace as windows of the monitor."""
        spent = self.synchronised()
        for index in range(self.steps // steps):
            part = slice(index * steps, (index + 1) * steps)
            yield from_phases(index, np.arange(self.ranks), spent[:, part], self.work[:, part])


def simulated(
    ranks: int, steps: int, rng: np.random.Generator, noise: float = 0.05, blips: float = 0.01, step_s: float = 0.1
) -> Trace:
    """Simulates healthy ranks: lognormal noise, and occasional steps that take twice as long."""
    spent = np.zeros((ranks, steps, len(CAUSES)))
    factor = np.exp(rng.normal(0, noise, (ranks, steps)))
    factor *= np.where(rng.random((ranks, steps)) < blips, 2.0, 1.0)
    for phase, share in SHARES.items():
        spent[:, :, phase] = share * step_s * factor * np.exp(rng.normal(0, noise / 2, (ranks, steps)))
    return Trace(spent, np.ones((ranks, steps)), 0.1 * step_s)


def resampled(recorded: Trace, ranks: int, steps: int, rng: np.random.Generator, block: int = 32) -> Trace:
    """Makes a healthy trace from blocks of a recorded one: each rank draws its own blocks of one recorded rank.

    Recorded ranks are first scaled to the same median: a trial needs equally fast ranks.
    """
    typical = np.median(recorded.busy(), axis=1)
    spent = np.empty((ranks, steps, recorded.spent.shape[2]))
    work = np.empty((ranks, steps))
    for rank in range(ranks):
        source = int(rng.integers(recorded.ranks))
        starts = rng.integers(0, recorded.steps - block + 1, size=-(-steps // block))
        picks = (starts[:, None] + np.arange(block)).ravel()[:steps]
        spent[rank] = recorded.spent[source, picks] * (np.median(typical) / typical[source])
        work[rank] = recorded.work[source, picks]
    return Trace(spent, work, recorded.transfer)


def slowed(
    trace: Trace, rank: int, phase: int, share: float, onset: int, every: int = 1, end: int | None = None
) -> Trace:
    """Slows a phase of a rank from ``onset`` on by ``share`` of its typical busy time; N times that every N steps."""
    typical = float(np.median(trace.busy()[rank]))
    spent = trace.spent.copy()
    spent[rank, onset:end:every, phase] += share * typical * every
    return replace(trace, spent=spent)


def slowed_processor(trace: Trace, rank: int, share: float, onset: int, end: int | None = None) -> Trace:
    """Slows all phases of a rank by a factor."""
    spent = trace.spent.copy()
    spent[rank, onset:end] *= 1 + share
    return replace(trace, spent=spent)
