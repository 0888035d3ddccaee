"""Which layers each stage of a pipeline has, and in which order it passes micro-batches forward and back. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass


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
