"""Validation and interval means over all ranks.

Models whose ranks communicate in each forward pass need the same number of passes on every rank: a rank that has run
out of batches repeats another rank's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hpctrain.comm.group import Group
from hpctrain.run.figures import Figure
from hpctrain.train.framework import Evaluator, HostBatch, Judged, Sums
from hpctrain.train.metrics import Evaluation, Meter, flattened


def evaluate(framework: Judged, sets: Mapping[str, Iterable[HostBatch]], group: Group) -> Evaluation:
    """Computes loss and metrics over the validation data of all ranks; exact even if ranks have unequal shares.

    Args:
        framework: has the task's model and metrics.
        sets: this rank's part of each set. Metrics of the first set keep their plain names; others are ``set/metric``.
        group: the ranks that evaluate.

    Raises:
        UserError: a metric fails, or returns neither a number nor a figure.
    """
    metrics: dict[str, float] = {}
    figures: dict[str, Figure] = {}
    with framework.merged_buffers(group):
        for number, (name, batches) in enumerate(sets.items()):
            found = evaluate_one(framework, batches, group)
            prefix = f"{name}/" if number else ""
            metrics |= {f"{prefix}{key}": value for key, value in found.metrics.items()}
            figures |= {f"{prefix}{key}": figure for key, figure in found.figures.items()}
    return Evaluation(metrics, figures)


def evaluate_one(framework: Evaluator, batches: Iterable[HostBatch], group: Group) -> Evaluation:
    """Evaluates one set. Function metrics are averaged from (sum, weight) pairs; others merge the state they keep."""
    totals: Sums = {}
    for meter in framework.meters.values():
        meter.reset()
    for batch, is_own in even_batches(batches, framework.sync_group):
        sums = framework.evaluate(batch, framework.meters.values() if is_own else ())
        add(totals, sums if is_own else {})
    metrics = mean_over_ranks(totals, group, "finish the evaluation")
    found = results_of(framework.meters, group)
    metrics |= group.broadcast(found.metrics, "tell the metrics") if framework.meters else {}
    return Evaluation(dict(sorted(metrics.items())), found.figures)


def results_of(meters: Mapping[str, Meter], group: Group) -> Evaluation:
    """Results of metrics that keep state, over the samples of all ranks, on rank 0; starts them again. Collective."""
    metrics: dict[str, float] = {}
    figures: dict[str, Figure] = {}
    for name, meter in meters.items():
        merged = group.merge(meter.state(), meter.merge, f"merge the metric {name}")
        found = Evaluation() if merged is None else flattened(name, meter.compute(merged))
        meter.reset()
        metrics |= found.metrics
        figures |= found.figures
    return Evaluation(metrics, figures)


def try_meters(framework: Evaluator, batch: HostBatch) -> None:
    """Raises UserError if a metric fails on this batch or its result cannot be reported; resets all metrics."""
    if not framework.meters:
        return
    for meter in framework.meters.values():
        meter.reset()
    framework.evaluate(batch, framework.meters.values())
    for name, meter in framework.meters.items():
        flattened(name, meter.compute(meter.state()))
        meter.reset()


def add(totals: dict[str, tuple[Any, Any]], more: Mapping[str, tuple[Any, Any]]) -> None:
    """Adds (sum, weight) pairs by name, in place; numbers, or scalars of a framework."""
    for name, (value, weight) in more.items():
        before_value, before_weight = totals.get(name, (0.0, 0.0))
        totals[name] = (before_value + value, before_weight + weight)


def mean_over_ranks(totals: Sums, group: Group, what: str) -> dict[str, float]:
    """Means of all ranks' (sum, weight) pairs, the same on every rank; names may be missing on some ranks."""
    everything: Sums = {}
    for sums in group.allgather(totals, what):
        add(everything, {name: (pair[0], pair[1]) for name, pair in sums.items()})
    return {name: value / weight for name, (value, weight) in sorted(everything.items()) if weight > 0}


SHARE = "send a batch to ranks that have none"
"""Completes "waited for the other ranks to ..." in errors."""


def even_batches(batches: Iterable[HostBatch], sync_group: Group | None) -> Iterator[tuple[HostBatch, bool]]:
    """Yields this rank's batches with True; then other ranks' with False until no rank has any left. Collective.

    Args:
        batches: this rank's batches.
        sync_group: ranks that communicate in each pass; None if passes are independent.
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


def even_passes(batches: Sequence[HostBatch], sync_group: Group | None) -> tuple[list[tuple[HostBatch, bool]], int]:
    """The same of an update's micro-batches, whose numbers ranks compare once; and the number of passes for which no
    rank needs another's. Collective."""
    found = [(batch, True) for batch in batches]
    if sync_group is None:
        return found, len(found)
    counts = sync_group.gather(np.array(len(batches)), "count micro-batches")
    fewest = int(counts.min())
    for number in range(fewest, int(counts.max())):
        own = batches[number] if number < len(batches) else None
        lent = shared_batch(own, int((counts > number).argmax()), sync_group)
        found += [(lent, False)] if own is None else []
    return found, fewest


def shared_batch(own: HostBatch | None, lender: int, group: Group) -> HostBatch:
    """Broadcasts one rank's batch to all. Collective."""
    described = {name: [list(array.shape), array.dtype.str] for name, array in (own or {}).items()}
    shapes = group.broadcast(described, SHARE, lender)
    lent = {name: np.empty(shape, kind) for name, (shape, kind) in shapes.items()}
    for name, array in lent.items():
        if group.rank == lender and own is not None:
            array[...] = own[name]
        group.broadcast_array(array, SHARE, lender)
    return lent
