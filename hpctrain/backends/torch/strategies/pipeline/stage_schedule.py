"""Pipeline stages: which layers each stage has, and in which order it runs forward and backward passes. If the task
does not assign layers to stages, they are divided as in an earlier attempt, or by measured times.

The division affects the last bits of results and the stages' random numbers, so a run keeps it when it resumes."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hpctrain.comm.group import Group
from hpctrain.train.framework import HostBatch


@dataclass(frozen=True)
class Pass:
    """One pass of a stage."""

    micro_batch: int
    """Index of the micro-batch."""
    forward: bool
    """True for a forward pass, False for a backward pass."""


def one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> list[Pass]:
    """The order of a stage's passes (1F1B; Narayanan et al. 2019, PipeDream, section 3.2, with a flush at the end).

    A stage runs forward passes until the first micro-batch comes back to it, then alternates: it never holds the
    activations of more micro-batches than there are stages from it to the last. There may be fewer micro-batches than
    stages.

    Args:
        stage: 0 to stages - 1.
        stages: number of stages.
        micro_batches: number of micro-batches per update.
    """
    ahead = min(stages - 1 - stage, micro_batches)
    order = [Pass(number, forward=True) for number in range(ahead)]
    for number in range(ahead, micro_batches):
        order += [Pass(number, forward=True), Pass(number - ahead, forward=False)]
    return order + [Pass(number, forward=False) for number in range(micro_batches - ahead, micro_batches)]


def bubble(stages: int, micro_batches: int) -> float:
    """Fraction of a step that each stage spends waiting, if all passes take the same time."""
    return (stages - 1) / (micro_batches + stages - 1)


def balanced(
    costs: Sequence[float], trained: Sequence[bool], stages: int, joined: Sequence[bool] = ()
) -> list[range] | None:
    """Divides layers into stages of consecutive layers so that the most expensive stage is as cheap as possible.

    Among equal solutions, prefers stages that begin with trained layers, and short early stages: those hold the
    activations of more micro-batches.

    Args:
        costs: cost of each layer, in order.
        trained: whether each layer has trained parameters; every stage needs such a layer.
        stages: number of stages.
        joined: whether each layer must be in the same stage as the previous one; none by default.

    Returns:
        The layer indices of each stage; None if there is no solution.
    """
    count = len(costs)
    may_begin = [number == 0 or not (joined and joined[number]) for number in range(count)]
    sums, known = [0.0, *itertools.accumulate(costs)], [0, *itertools.accumulate(trained)]
    best = [[(math.inf, False)] * (count + 1) for _ in range(stages + 1)]
    """By number of stages and layers in them: cost of the most expensive stage; whether the last begins untrained."""
    cuts = [[0] * (count + 1) for _ in range(stages + 1)]
    best[0][0] = (0.0, False)
    for made in range(1, stages + 1):
        for end in range(made, count + 1):
            for begin in range(made - 1, end):
                if not may_begin[begin] or known[begin] == known[end]:
                    continue
                worst = max(best[made - 1][begin][0], sums[end] - sums[begin])
                if (worst, not trained[begin]) < best[made][end]:
                    best[made][end], cuts[made][end] = (worst, not trained[begin]), begin
    if best[stages][count][0] == math.inf:
        return None
    ends = [count]
    for made in range(stages, 0, -1):
        ends.append(cuts[made][ends[-1]])
    return [range(begin, end) for begin, end in itertools.pairwise(reversed(ends))]


LEAST_PASSES, MOST_PASSES = 2, 20
"""Limits on the number of measured passes, after one warm-up pass."""
BUDGET_S = 1.0
"""After this time, no more than the minimum number of passes is measured."""


@dataclass(frozen=True)
class StageChoice:
    """Where a run's stage sizes come from, and where they are recorded."""

    batch: Callable[[], HostBatch] | None = None
    """Returns this rank's first micro-batch, empty if it has none, to time layers with. Collective. None: go by the
    number of parameters instead."""
    kept: Sequence[int] = ()
    """Stage sizes of an earlier attempt; empty if there was none with this plan."""
    record: Callable[[Sequence[int], Sequence[float]], object] | None = None
    """Called with the stage sizes and each layer's seconds if layers were timed."""


BY_PARAMETERS = StageChoice()


def agreed_times(one_pass: Callable[[], Sequence[float] | None], group: Group) -> list[float]:
    """Seconds per layer, the same on all ranks: the minimum over each rank's passes, averaged over ranks.

    Collective over the group: all ranks make the same number of passes, which may themselves be collective.

    Args:
        one_pass: times each layer once; returns None on a rank that has no samples or cannot time layers.
        group: all ranks.

    Returns:
        Seconds of each layer; empty if no rank could time them.
    """
    fastest: dict[int, list[float]] = {}
    spent = 0.0
    for number in range(1 + MOST_PASSES):
        everywhere = group.allgather(one_pass(), "time the layers of the model")
        known = {rank: seconds for rank, seconds in enumerate(everywhere) if seconds is not None}
        if not known:
            return []
        spent += max(map(sum, known.values()))
        if number > 0:  # the first pass is a warm-up
            for rank, seconds in known.items():
                fastest[rank] = list(map(min, seconds, fastest.get(rank, seconds)))
        if number >= LEAST_PASSES and spent > BUDGET_S:
            break
    return list(map(statistics.fmean, zip(*fastest.values(), strict=True)))
