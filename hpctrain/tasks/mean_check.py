"""Tries on a few samples whether a loss or metric is a mean over samples, or a sum and its weight: only these can be
averaged over ranks and micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hpctrain.errors import UserError
from hpctrain.tasks.definition import PerBatch

MOST_SAMPLES = 6
"""Samples that are tried; split into 2 and 4, so that losses over pairs of samples are not torn apart."""
TOLERANCE, TOLERANCE_16_BITS = 1e-4, 2e-2
"""Allowed relative difference, by the type of the score; rounding is far below."""
MEANT = "if it compares the samples of a batch on purpose, as contrastive losses do, give hpctrain.PerBatch(loss)"


@dataclass(frozen=True)
class LossReader:
    """What the check needs of a framework."""

    read: Callable[[Any, int], tuple[float, float, float]]
    """read(score, samples) returns its sum and weight, and the tolerance for them."""
    map: Callable[[Callable[[Any], Any], Any], Any]
    """map(function, value) applies a function to all leaves of a nested value."""
    copy: Callable[[Any], Any]
    """Copies a tensor, since a loss may change what it gets."""


@dataclass(frozen=True)
class Score:
    """A loss or metric of some samples."""

    samples: int
    weighted: bool
    """Whether the task returned (sum, weight)."""
    total: float
    weight: float
    tolerance: float


class Undivided(Exception):
    """A value has no row for each sample."""


def require_mean(
    framework: LossReader,
    field: str,
    judge: Callable[[Any, Any], Any],
    outputs: Any,
    batch: Mapping[str, Any],
    again: Callable[[Mapping[str, Any]], Any] | None = None,
    fix: str = "",
) -> None:
    """Raises UserError if a loss or metric of some samples does not follow from those of two parts of them.

    The outputs are divided, so that dropout and BatchNorm make no difference. They are computed again to confirm a
    difference, and if they cannot be divided, such as a loss that the model returns. What is random, or fails on a part
    of a batch, passes.

    Args:
        framework: the framework.
        field: the field of the task, for messages.
        judge: the loss or metric, which works for the whole batch.
        outputs: what it got.
        batch: what it got.
        again: again(batch) computes outputs in evaluation mode; None if passes are collective.
        fix: how a mean is given, if not by a function that returns it.
    """
    samples = len(next(iter(batch.values())))
    if isinstance(judge, PerBatch) or samples < 2:
        return
    most = min(samples, MOST_SAMPLES)
    cut = max(1, most // 3)

    def divided(value: Any, rows: slice) -> Any:
        def leaf(one: Any) -> Any:
            if one is None or isinstance(one, (bool, int, float, str)):
                return one
            if not getattr(one, "shape", ()) or one.shape[0] != samples:
                raise Undivided
            return framework.copy(one[rows])

        return framework.map(leaf, value)

    def tried(outputs_of: Callable[[slice, Mapping[str, Any]], Any]) -> list[Score] | None:
        """All samples and the parts if they differ, an empty list if they do not, and None if that is unknown."""

        def score(first: int, end: int) -> Score:
            part = divided(dict(batch), slice(first, end))
            found = judge(outputs_of(slice(first, end), part), part)
            return Score(end - first, isinstance(found, (tuple, list)), *framework.read(found, end - first))

        try:
            scores = [score(0, most), score(0, cut), score(cut, most)]
            if add_up("total", *scores) and add_up("weight", *scores):
                return []
            repeated = score(0, most)
            return scores if (repeated.total, repeated.weight) == (scores[0].total, scores[0].weight) else None
        except Exception:  # of the task's own code, which may need a whole batch
            return None

    found = tried(lambda rows, part: divided(outputs, rows))
    if found != [] and again is not None:
        repeated = tried(lambda rows, part: again(part))
        found = found if repeated is None else repeated
    if found:
        raise uneven(field, fix, *found)


def add_up(what: str, whole: Score, *parts: Score) -> bool:
    """Whether ``total`` or ``weight`` of the parts add up to that of the whole; true for what is not finite."""
    total, *each = (getattr(one, what) for one in (whole, *parts))
    return not abs(total - sum(each)) > whole.tolerance * max(map(abs, (total, *each)))


def uneven(field: str, fix: str, whole: Score, first: Score, rest: Score) -> UserError:
    """The error for a score of some samples that does not follow from those of two parts of them."""

    def values(of: Callable[[Score], float]) -> str:
        return (
            f"{of(first):.6g} for {first.samples} samples, {of(rest):.6g} for {rest.samples} others and "
            f"{of(whole):.6g} for all {whole.samples}"
        )

    meant = MEANT if field == "loss" else "or write it as an hpctrain.Metric, whose state is merged over ranks"
    if not whole.weighted:
        mean = (first.total + rest.total) / whole.samples
        return UserError(
            f"{field} is not a mean over the samples, which ranks and micro-batches could average: it is "
            f"{values(lambda one: one.total / one.samples)}, and not {mean:.6g}",
            fix or f"return (sum, weight), two scalars that add up, such as ((each * mask).sum(), mask.sum()); {meant}",
        )
    if not add_up("weight", whole, first, rest):
        return UserError(
            f"{field} returned a weight that does not add up over samples: {values(lambda one: one.weight)}",
            "return (sum, weight), with the number of these samples as the weight; of two losses return the sum",
        )
    return UserError(
        f"{field} returned (sum, weight) with a sum that does not add up over samples: {values(lambda one: one.total)}",
        f"return the sum, not the mean, and add a penalty times the weight; {meant}",
    )
