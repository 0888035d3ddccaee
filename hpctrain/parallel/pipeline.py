"""Which layers each stage of a pipeline has, and in which order it passes micro-batches forward and back; how layers
are divided if the task does not say it: as an earlier attempt did, or by their times.

What is trained depends on that in the last bits, and on the random numbers of stages: a run keeps its choice when
it resumes."""

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
    """What a stage does next."""

    micro_batch: int
    """Number of the micro-batch."""
    forward: bool
    """Else backward."""


def one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> list[Pass]:
    """The order of a stage's passes (1F1B; Narayanan et al. 2019, PipeDream, section 3.2, with a flush at the end).

    A stage goes forward until the first micro-batch has come back to it, then takes turns: it never holds the
    activations of more micro-batches than there are stages from it to the last. Micro-batches may be fewer than stages.

    Args:
        stage: 0 to stages - 1.
        stages: of the pipeline.
        micro_batches: of one update.
    """
    ahead = min(stages - 1 - stage, micro_batches)
    order = [Pass(number, forward=True) for number in range(ahead)]
    for number in range(ahead, micro_batches):
        order += [Pass(number, forward=True), Pass(number - ahead, forward=False)]
    return order + [Pass(number, forward=False) for number in range(micro_batches - ahead, micro_batches)]


def bubble(stages: int, micro_batches: int) -> float:
    """Share of a step's time for which each stage waits if all passes take equally long."""
    return (stages - 1) / (micro_batches + stages - 1)


def balanced(
    costs: Sequence[float], trained: Sequence[bool], stages: int, joined: Sequence[bool] = ()
) -> list[range] | None:
    """Neighbouring layers for each stage, so that the most expensive stage costs as little as can be.

    Of several such ways, one in which stages begin with layers that are trained, and early ones are short: they hold
    the activations of more micro-batches.

    Args:
        costs: of each layer, in order.
        trained: whether a layer has parameters that are trained; each stage needs one that has.
        stages: to make.
        joined: whether a layer must be in the stage of the one before it; none by default.

    Returns:
        The numbers of each stage's layers; None if there is no such way.
    """
    count = len(costs)
    may_begin = [number == 0 or not (joined and joined[number]) for number in range(count)]
    sums, known = [0.0, *itertools.accumulate(costs)], [0, *itertools.accumulate(trained)]
    best = [[(math.inf, False)] * (count + 1) for _ in range(stages + 1)]
    """By stages made and layers in them: cost of the most expensive stage, and whether the last begins untrained."""
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
