"""Over all ranks: validation, and the means of a reported interval; equally many passes on each, for models whose ranks
exchange something in each pass: a rank that has no batch left gets another's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from hpctrain.comm.group import Group
from hpctrain.run.figures import Figure
from hpctrain.train.framework import Evaluator, HostBatch, Sums
from hpctrain.train.metrics import Evaluation, flattened


def evaluate(framework: Evaluator, sets: Mapping[str, Iterable[HostBatch]], group: Group) -> Evaluation:
    """Loss and metrics over validation data of all ranks; exact whatever share each rank has.

    Args:
        framework: with the task's model and metrics.
        sets: this rank's part of each set. The names of the first one's metrics are plain; others are ``set/metric``.
        group: the ranks.

    Raises:
        UserError: a metric fails, or gives what is neither a number nor a figure.
    """
    metrics: dict[str, float] = {}
    figures: dict[str, Figure] = {}
    for number, (name, batches) in enumerate(sets.items()):
        found = evaluate_one(framework, batches, group)
        prefix = f"{name}/" if number else ""
        metrics |= {f"{prefix}{key}": value for key, value in found.metrics.items()}
        figures |= {f"{prefix}{key}": figure for key, figure in found.figures.items()}
    return Evaluation(metrics, figures)


def evaluate_one(framework: Evaluator, batches: Iterable[HostBatch], group: Group) -> Evaluation:
    """Of one set. A function is a mean: its state is (sum, weight); other metrics keep what they say they need."""
    totals: Sums = {}
    for meter in framework.meters.values():
        meter.reset()
    for batch, is_own in even_batches(batches, framework.sync_group):
        sums = framework.evaluate(batch, framework.meters.values() if is_own else ())
        add(totals, sums if is_own else {})
    metrics = mean_over_ranks(totals, group, "finish the evaluation")
    figures: dict[str, Figure] = {}
    for name, meter in framework.meters.items():
        what = f"merge the metric {name}"
        merged = group.merge(meter.state(), meter.merge, what)
        meter.reset()
        found = Evaluation() if merged is None else flattened(name, meter.compute(merged))
        metrics |= group.broadcast(found.metrics, what)
        figures |= found.figures
    return Evaluation(dict(sorted(metrics.items())), figures)


def try_meters(framework: Evaluator, batch: HostBatch) -> None:
    """Raises UserError naming a metric that fails on this batch, or says what cannot be reported; leaves no trace."""
    if not framework.meters:
        return
    for meter in framework.meters.values():
        meter.reset()
    framework.evaluate(batch, framework.meters.values())
    for name, meter in framework.meters.items():
        flattened(name, meter.compute(meter.state()))
        meter.reset()


def add(totals: Sums, more: Mapping[str, tuple[float, float]]) -> None:
    """Adds (sum, weight) pairs by name, in place."""
    for name, (value, weight) in more.items():
        before_value, before_weight = totals.get(name, (0.0, 0.0))
        totals[name] = (before_value + value, before_weight + weight)


def mean_over_ranks(totals: Sums, group: Group, what: str) -> dict[str, float]:
    """Means of all ranks' (sum, weight) pairs, the same on every rank; a rank may lack names that others have."""
    everything: Sums = {}
    for sums in group.allgather(totals, what):
        add(everything, {name: (pair[0], pair[1]) for name, pair in sums.items()})
    return {name: value / weight for name, (value, weight) in sorted(everything.items()) if weight > 0}


SHARE = "send a batch to ranks that have none"
"""What a rank waits for."""


def even_batches(batches: Iterable[HostBatch], sync_group: Group | None) -> Iterator[tuple[HostBatch, bool]]:
    """This rank's batches, each with True; then others', with False, as long as some rank has batches. Collective.

    Args:
        batches: of this rank.
        sync_group: ranks that exchange something in passes; None if each makes its own.
    """
    if sync_group is None:
        yield from ((batch, True) for batch in batches)
        return
    left = iter(batches)
    while True:
        own = next(left, None)
        have = sync_group.gather(np.array(own is not None), "see who has batches left")
        if not have.any():
            return
        lent = None if have.all() else shared_batch(own, int(have.argmax()), sync_group)
        if own is not None:
            yield own, True
        elif lent is not None:
            yield lent, False


def shared_batch(own: HostBatch | None, lender: int, group: Group) -> HostBatch:
    """The batch of one rank, on all. Collective."""
    told = {name: [list(array.shape), array.dtype.str] for name, array in (own or {}).items()}
    shapes = group.broadcast(told, SHARE, lender)
    lent = {name: np.empty(shape, kind) for name, (shape, kind) in shapes.items()}
    for name, array in lent.items():
        if group.rank == lender and own is not None:
            array[...] = own[name]
        group.broadcast_array(array, SHARE, lender)
    return lent
