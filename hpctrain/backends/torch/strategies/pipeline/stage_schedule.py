"""Pipeline stages: which layers each stage has, and in which order it runs forward and backward passes. If the task
does not assign layers to stages, they are divided as in an earlier attempt, or by measured times.

The division affects the last bits of results and the stages' random numbers, so a run keeps it when it resumes."""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from hpctrain.comm.group import Group
from hpctrain.train.framework import HostBatch


@dataclass(frozen=True)
class Pass:
    """One pass of a stage: of a chunk of consecutive layers, of which a rank may have several."""

    micro_batch: int
    """Index of the micro-batch."""
    forward: bool
    """True for a forward pass, False for a backward pass."""
    chunk: int = 0
    """Index of the stage among those of the rank."""


def one_forward_one_backward(rank: int, ranks: int, micro_batches: int, chunks: int = 1) -> list[Pass]:
    """The order of a rank's passes (1F1B; Narayanan et al. 2019, PipeDream, section 3.2, with a flush at the end).

    A rank runs forward passes until the first micro-batch comes back to it, then alternates: it never holds the
    activations of more micro-batches than there are ranks from it to the last. There may be fewer micro-batches than
    ranks. With several chunks per rank, of which the first of each rank come before the second ones, it is interleaved
    1F1B (Narayanan et al. 2021, Megatron-LM, section 2.2): micro-batches pass in rounds, through one chunk after the
    other. As in PyTorch, a round has at least as many micro-batches as there are ranks, if there are that many.

    Args:
        rank: 0 to ranks - 1.
        ranks: number of ranks of the pipeline.
        micro_batches: number of micro-batches per update.
        chunks: number of stages of each rank.
    """
    count = max(micro_batches // ranks, 1)
    rounds = [range(micro_batches * one // count, micro_batches * (one + 1) // count) for one in range(count)]
    forward = [Pass(number, True, chunk) for own in rounds for chunk in range(chunks) for number in own]
    backward = [Pass(number, False, chunk) for own in rounds for chunk in reversed(range(chunks)) for number in own]
    ahead = ranks - 1 - rank
    if chunks > 1:
        ahead = 2 * ahead + (chunks - 1) * max(map(len, rounds))
    ahead = min(ahead, len(forward))
    alternating = itertools.chain(*zip(forward[ahead:], backward, strict=False))
    return [*forward[:ahead], *alternating, *backward[len(forward) - ahead :]]


def source(rank: int, each: Pass, ranks: int, chunks: int) -> tuple[int, Pass] | None:
    """The rank and its pass whose output a pass gets; None for inputs and the loss."""
    stage = each.chunk * ranks + rank + (-1 if each.forward else 1)
    if stage not in range(ranks * chunks):
        return None
    return stage % ranks, Pass(each.micro_batch, each.forward, stage // ranks)


def ends(ranks: int, micro_batches: int, chunks: int = 1) -> list[dict[Pass, int]]:
    """For each rank, when each of its passes ends, in passes since the begin of an update, if all take equally long."""
    left = [deque(one_forward_one_backward(rank, ranks, micro_batches, chunks)) for rank in range(ranks)]
    found: list[dict[Pass, int]] = [{} for _ in left]

    def is_able(rank: int) -> bool:
        before = source(rank, left[rank][0], ranks, chunks) if left[rank] else (rank, None)
        return before is None or before[1] in found[before[0]]

    for now in itertools.count(1):
        able = list(filter(is_able, range(ranks)))
        if not able:
            break
        for rank in able:
            found[rank][left[rank].popleft()] = now
    assert not any(left), "no rank waits for what never comes"
    return found


class Act(Enum):
    """A part of a pass."""

    RECEIVE = auto()
    """Begin to receive what it needs of another rank."""
    COMPUTE = auto()
    SEND = auto()


@functools.lru_cache(maxsize=16)
def acts(rank: int, ranks: int, micro_batches: int, chunks: int, in_order: bool) -> list[tuple[Act, Pass]]:
    """What a rank does in an update, one after the other; arguments as for ``one_forward_one_backward``.

    Args:
        in_order: whether two ranks must begin the messages between them in the same order, as if each rank handled one
            at a time, which ends when the other rank reaches it. All ranks then begin messages in the order in which
            ``ends`` makes them, so that none waits for another in a circle; else a rank receives when it needs to.
    """
    order = one_forward_one_backward(rank, ranks, micro_batches, chunks)
    sources = {each: before for each in order if (before := source(rank, each, ranks, chunks))}
    found: list[tuple[Act, Pass]] = []
    if not in_order:
        for each in order:
            found += [(Act.RECEIVE, each)] if each in sources else []
            found += [(Act.COMPUTE, each), (Act.SEND, each)]
        return found
    times = ends(ranks, micro_batches, chunks)
    made = {each: (times[other][before], other) for each, (other, before) in sources.items()}
    coming = deque(sorted(made, key=made.__getitem__))
    for each in order:
        for act, moment in ((Act.COMPUTE, made.get(each, (0, 0))), (Act.SEND, (times[rank][each], rank))):
            while coming and made[coming[0]] <= moment:
                found.append((Act.RECEIVE, coming.popleft()))
            found.append((act, each))
    return found


def bubble(ranks: int, micro_batches: int, chunks: int = 1) -> float:
    """Fraction of a step that each rank spends waiting, if all passes take the same time."""
    idle = ranks - 1 + (chunks - 1) * max(ranks - micro_batches, 0)
    return idle / (chunks * micro_batches + idle)


def most_held(ranks: int, micro_batches: int, chunks: int = 1) -> int:
    """The most passes of which the first rank, which has most, holds the activations at a time."""
    order = one_forward_one_backward(0, ranks, micro_batches, chunks)
    return max(itertools.accumulate(1 if each.forward else -1 for each in order))


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
    sums = [0.0, *itertools.accumulate(costs)]
    known = [0, *itertools.accumulate(trained)]
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
                    best[made][end] = (worst, not trained[begin])
                    cuts[made][end] = begin
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
