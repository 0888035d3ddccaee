"""How often which class is taken for which: F1 and the confusion matrix. Exact over any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hpctrain.errors import UserError
from hpctrain.run.figures import Matrix
from hpctrain.train.metrics import MetricState

MOST_CLASSES = 100_000
MOST_ROWS = 200
"""Classes of a matrix that somebody is to look at."""


@dataclass(frozen=True)
class F1:
    """F1 score, as ``sklearn.metrics.f1_score`` gives it for all samples at once. Keeps three counts a class.

    Gets classes as whole numbers from 0, or outputs to decide by: with an axis of classes more than the targets have
    (the largest wins), or as many as the targets, for two classes (above ``threshold`` is class 1).
    """

    average: Literal["binary", "macro", "micro"] = "binary"
    """Of class 1 (``binary``), the mean over the classes that occur (``macro``), or from the counts of all of them
    (``micro``)."""
    threshold: float = 0.5
    """Of outputs for two classes: 0.5 suits probabilities, 0 suits logits."""

    def __post_init__(self) -> None:
        if self.average not in ("binary", "macro", "micro"):
            raise UserError(f"F1 has the average {self.average!r}", "write binary, macro or micro")

    def init(self) -> MetricState:
        """Rows: hits, samples of the class, times that it was predicted."""
        return {"counts": np.zeros((3, 2), np.int64)}

    def update(self, state: MetricState, *arrays: Any) -> MetricState:
        predicted, true = decided(self.threshold, *arrays)
        size = max(int(max(predicted.max(initial=0), true.max(initial=0))) + 1, 2)
        if size > 2 and self.average == "binary":
            raise UserError(f"it is binary and gets class {size - 1}", "write F1('macro') or F1('micro')")
        found = [np.bincount(each, minlength=size) for each in (predicted[predicted == true], true, predicted)]
        return {"counts": sum_of(state["counts"], np.array(found, np.int64))}

    def merge(self, first: MetricState, second: MetricState) -> MetricState:
        return {"counts": sum_of(first["counts"], second["counts"])}

    def compute(self, state: MetricState) -> float:
        """0 if no sample is of the class and none was taken for it."""
        counts = state["counts"][:, 1:2] if self.average == "binary" else state["counts"]
        counts = counts.sum(axis=1, keepdims=True) if self.average == "micro" else counts
        hits, true, predicted = counts[:, counts[1] + counts[2] > 0]
        return float(np.mean(2 * hits / (true + predicted))) if hits.size else 0.0


@dataclass(frozen=True)
class ConfusionMatrix:
    """Counts of true against predicted classes, for the report. Gets what ``F1`` gets; keeps classes squared counts."""

    labels: Sequence[str] = ()
    """Names of the classes, from 0; by default their numbers."""
    threshold: float = 0.5
    """Of outputs for two classes: 0.5 suits probabilities, 0 suits logits."""

    def init(self) -> MetricState:
        """Of the classes that have names, or of two."""
        size = max(len(self.labels), 2)
        return {"counts": np.zeros((size, size), np.int64)}

    def update(self, state: MetricState, *arrays: Any) -> MetricState:
        predicted, true = decided(self.threshold, *arrays)
        size = int(max(predicted.max(initial=0), true.max(initial=0))) + 1
        if size > (len(self.labels) or MOST_ROWS):
            named = f"has names for {len(self.labels)}" if self.labels else f"shows at most {MOST_ROWS}"
            fix = "give a label for each" if self.labels else "pick the classes to show with hpctrain.Selected"
            raise UserError(f"it gets class {size - 1}, and {named} classes", fix)
        size = max(size, len(state["counts"]))
        found = np.bincount(true * size + predicted, minlength=size * size).reshape(size, size)
        return {"counts": sum_of(state["counts"], found)}

    def merge(self, first: MetricState, second: MetricState) -> MetricState:
        return {"counts": sum_of(first["counts"], second["counts"])}

    def compute(self, state: MetricState) -> Matrix:
        counts = state["counts"]
        labels = self.labels or [str(number) for number in range(len(counts))]
        return Matrix(tuple(labels), tuple(map(tuple, counts.tolist())))


def decided(threshold: float, *arrays: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Predicted and true classes, one-dimensional; raises UserError if that is not what is given."""
    outputs, targets = np.asarray(arrays[0]), np.asarray(arrays[-1])
    if outputs.size != targets.size and targets.ndim > 1 and targets.shape[-1] == 1:
        targets = targets[..., 0]
    axes = [axis for axis in {1, outputs.ndim - 1} if 0 < axis < outputs.ndim]
    fitting = [axis for axis in axes if (*outputs.shape[:axis], *outputs.shape[axis + 1 :]) == targets.shape]
    if len(arrays) == 2 and outputs.size == targets.size:
        predicted = outputs > threshold if outputs.dtype.kind == "f" else outputs
    elif len(arrays) == 2 and len(fitting) == 1:
        predicted = outputs.argmax(axis=fitting[0])
    else:
        raise UserError(
            f"it gets predictions {outputs.dtype}{list(outputs.shape)} and targets {targets.dtype}"
            f"{list(targets.shape)}, which do not go together",
            "pick a class for each sample: "
            "hpctrain.Selected(hpctrain.F1(), lambda outputs, batch: (outputs.argmax(1), batch['y']))",
        )
    return class_numbers(predicted.reshape(-1), "prediction"), class_numbers(targets.reshape(-1), "target")


def class_numbers(values: NDArray[Any], what: str) -> NDArray[np.int64]:
    """As whole numbers; raises UserError for others, and for classes that no one has."""
    wrong = [values.dtype] if values.dtype.kind not in "biuf" else []
    wrong = wrong or values[~((values >= 0) & (values < MOST_CLASSES) & (values % 1 == 0))][:1].tolist()
    if wrong:
        raise UserError(
            f"a {what} is {wrong[0]}, not a class from 0 to {MOST_CLASSES - 1}",
            "leave out samples without a class: hpctrain.Selected(metric, function) picks those that count",
        )
    return values.astype(np.int64)


def sum_of(first: NDArray[np.int64], second: NDArray[np.int64]) -> NDArray[np.int64]:
    """Of counts, of which one may know of more classes."""
    total = np.zeros(np.maximum(first.shape, second.shape), np.int64)
    for part in (first, second):
        total[tuple(map(slice, part.shape))] += part
    return total
