"""How layers are shared out among stages if the task does not say it: as an earlier attempt did, or by their times.

What is trained depends on it in the last bits, and on the random numbers of stages: a run keeps its choice on resume.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hpctrain.comm.group import Group
from hpctrain.train.framework import HostBatch

LEAST_PASSES, MOST_PASSES = 2, 20
"""That are measured, after one that makes ready."""
BUDGET_S = 1.0
"""After which there are no more than the least."""


@dataclass(frozen=True)
class StageChoice:
    """Where a run's choice comes from, and where it is kept."""

    batch: Callable[[], HostBatch] | None = None
    """This rank's first micro-batch, empty if it has none, on which layers are timed; None to go by parameters alone.
    Collective."""
    kept: Sequence[int] = ()
    """How many layers each stage had in an earlier attempt; empty if there was none at this plan."""
    record: Callable[[Sequence[int], Sequence[float]], object] | None = None
    """Called with how many layers each stage has, and the seconds of each layer, if there was a choice."""


BY_PARAMETERS = StageChoice()


def agreed_times(one_pass: Callable[[], Sequence[float] | None], group: Group) -> list[float]:
    """Seconds of each layer, the same on all ranks: of each rank's passes the fastest, and of these the mean.

    Collective over the group: all ranks make equally many passes, in which some may meet.

    Args:
        one_pass: times the layers once; None of a rank that has no samples, or cannot time them.
        group: all ranks.

    Returns:
        Nothing if no rank could time them.
    """
    fastest: dict[int, list[float]] = {}
    spent = 0.0
    for number in range(1 + MOST_PASSES):
        told = group.allgather(one_pass(), "time the layers of the model")
        known = {rank: seconds for rank, seconds in enumerate(told) if seconds is not None}
        if not known:
            return []
        spent += max(map(sum, known.values()))
        if number > 0:  # the first pass makes ready
            for rank, seconds in known.items():
                fastest[rank] = list(map(min, seconds, fastest.get(rank, seconds)))
        if number >= LEAST_PASSES and spent > BUDGET_S:
            break
    return list(map(statistics.fmean, zip(*fastest.values(), strict=True)))
