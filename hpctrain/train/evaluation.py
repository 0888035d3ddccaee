"""Averages over all ranks: validation, and the means of a reported interval."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hpctrain.comm.group import Group
from hpctrain.train.framework import Framework, HostBatch, Sums


def evaluate(framework: Framework, batches: Iterable[HostBatch], group: Group) -> dict[str, float]:
    """Loss and metrics over the validation data of all ranks; exact whatever share each rank has."""
    totals: Sums = {}
    for batch in batches:
        add(totals, framework.evaluate(batch))
    return mean_over_ranks(totals, group, "finish the evaluation")


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
