"""How well scores tell two classes apart: area under the ROC curve, and the curves. Exact over any number of ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.errors import UserError
from hpctrain.run.figures import Curve
from hpctrain.train.metrics import MetricState

POINTS = 200
"""Of a curve that is kept for the report; the ends and, along the curve, evenly spaced ones."""


class Ranking:
    """Keeps the score and the class of every sample: 5 bytes a sample for fp32 scores, on rank 0 of all samples."""

    def init(self) -> MetricState:
        return {"scores": [], "positive": []}

    def update(self, state: MetricState, *arrays: Any) -> MetricState:
        scores, positive = scored(*arrays)
        state["scores"].append(scores)
        state["positive"].append(positive)
        return state

    def merge(self, first: MetricState, second: MetricState) -> MetricState:
        return {name: first[name] + second[name] for name in first}


class AUC(Ranking):
    """Area under the ROC curve of two classes, as ``sklearn.metrics.roc_auc_score`` gives it for all samples at once.

    Gets one score a sample, higher for the positive class (probabilities, logits), and classes 0 and 1. Memory: 5 bytes
    a sample for fp32 scores, on rank 0 for the samples of all ranks. NaN if all samples are of one class.
    """

    def compute(self, state: MetricState) -> float:
        false, true = counts_above(state)
        whole = int(false[-1]) * int(true[-1])
        if not whole:
            return float("nan")
        return float(np.sum(np.diff(false) * (true[1:] + true[:-1]))) / (2 * whole)


class RocCurve(Ranking):
    """True against false positive rate, for the report, in at most 200 points. Gets what ``AUC`` gets, and keeps it."""

    def compute(self, state: MetricState) -> Curve | float:
        false, true = counts_above(state)
        if not false[-1] * true[-1]:
            return float("nan")
        return thinned("false positive rate", "true positive rate", false / false[-1], true / true[-1])


class PrecisionRecallCurve(Ranking):
    """Precision against recall, for the report, in at most 200 points. Gets what ``AUC`` gets, and keeps it."""

    def compute(self, state: MetricState) -> Curve | float:
        false, true = counts_above(state)
        if not true[-1]:
            return float("nan")
        precision = true[1:] / (true[1:] + false[1:])
        recall = true[1:] / true[-1]
        return thinned("recall", "precision", np.append(0.0, recall), np.append(1.0, precision))


def scored(*arrays: Any) -> tuple[NDArray[np.floating], NDArray[np.bool_]]:
    """One score and one class a sample; raises UserError if that is not what is given."""
    scores, classes = np.asarray(arrays[0]), np.asarray(arrays[-1])
    if len(arrays) != 2 or scores.size != classes.size or scores.dtype.kind not in "fiu":
        raise UserError(
            f"it gets predictions {scores.dtype}{list(scores.shape)} and targets {classes.dtype}{list(classes.shape)}, "
            "not a score and a class 0 or 1 for each sample",
            "pick them: hpctrain.Selected(hpctrain.AUC(), lambda outputs, batch: (outputs[:, 1], batch['y']))",
        )
    if not np.isin(classes, (0, 1)).all():
        found = ", ".join(f"{value:g}" for value in np.unique(classes)[:4].astype(float))
        raise UserError(f"it gets the classes {found}", "give 0 and 1: of more classes, one against the rest")
    return np.array(scores).reshape(-1), classes.astype(bool).reshape(-1)


def counts_above(state: MetricState) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Samples of the negative and of the positive class with scores of at least each threshold, from none to all.

    Equal scores are one threshold (Fawcett 2006, An introduction to ROC analysis, algorithm 1). A score that is NaN
    ranks nothing: then there is no sample of either class.
    """
    scores = np.concatenate([np.empty(0, np.float32), *state["scores"]])
    positive = np.concatenate([np.empty(0, bool), *state["positive"]])
    if np.isnan(scores).any():
        return np.zeros(1, np.int64), np.zeros(1, np.int64)
    order = np.argsort(scores, kind="stable")[::-1]
    scores, positive = scores[order], positive[order]
    ends = np.append(np.flatnonzero(scores[1:] != scores[:-1]), len(scores) - 1) if len(scores) else np.empty(0, int)
    true = np.cumsum(positive, dtype=np.int64)[ends]
    return np.append(0, ends + 1 - true), np.append(0, true)


def thinned(x_label: str, y_label: str, x: NDArray[np.float64], y: NDArray[np.float64]) -> Curve:
    """A curve of few points."""
    if len(x) > POINTS:
        along = np.append(0, np.cumsum(np.abs(np.diff(x)) + np.abs(np.diff(y))))
        chosen = np.unique(np.searchsorted(along, np.linspace(0, along[-1], POINTS - 1)))
        chosen = np.unique(np.append(np.minimum(chosen, len(x) - 1), len(x) - 1))
        x, y = x[chosen], y[chosen]
    return Curve(x_label, y_label, tuple(x.tolist()), tuple(y.tolist()))
