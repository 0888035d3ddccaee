"""Adapts torchmetrics in a TorchTask. The package is not imported: only the metric objects' interface is used."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from hpctrain.backends.torch.strategies.tp_group import HALVES
from hpctrain.errors import UserError, kind_of
from hpctrain.run.figures import Curve
from hpctrain.tasks.definition import Task
from hpctrain.tasks.meters import Entry, TorchMetric, entries_of
from hpctrain.train.metrics import Arrays, Seen

REDUCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "dim_zero_sum": np.add,
    "dim_zero_max": np.maximum,
    "dim_zero_min": np.minimum,
    "dim_zero_cat": lambda first, second: np.concatenate([first, second]),
}
"""Functions that merge the states of two ranks, by name of torchmetrics' ``dist_reduce_fx``. The mean is missing: the
mean of the ranks' means is wrong if they have different numbers of samples."""


def of_torchmetrics(task: Task) -> str | None:
    """Field of the task's first torchmetrics metric; None if there is none."""
    return next((one.field for one in entries_of(task.metrics).values() if isinstance(one.metric, TorchMetric)), None)


class TorchMetricMeter:
    """See train.metrics.Meter. States are merged here as the metric declares, without torch.distributed."""

    def __init__(self, entry: Entry, device: torch.device) -> None:
        self.entry = entry
        self.metric = entry.metric.to(device)
        self.device = device
        self.reductions = {name: reduction_of(entry, name) for name in entry.metric._defaults}
        parts = [part for part in entry.metric.modules() if part is not entry.metric and isinstance(part, TorchMetric)]
        if parts or not self.reductions:
            what = f"{entry.field} of the task is {kind_of(entry.metric)}, which keeps its state in other metrics"
            raise UserError(what, "give these by themselves, each under a unique name")

    def reset(self) -> None:
        self.metric.reset()

    def update(self, seen: Seen) -> None:
        with self.entry.named(seen.batch):
            outputs = full_precision(seen.outputs, torch.Tensor.detach)
            self.metric.update(*self.entry.arguments(outputs, seen.batch))

    def state(self) -> Arrays:
        states = self.metric.metric_state
        return {name: on_host(value) for name, value in states.items() if not isinstance(value, list) or value}

    def merge(self, first: Arrays, second: Arrays) -> Arrays:
        both = {**first, **second}
        common = {name: self.reductions[name](first[name], second[name]) for name in first if name in second}
        return both | common

    def compute(self, state: Arrays) -> Any:
        tensors = {name: torch.from_numpy(np.array(value)).to(self.device) for name, value in state.items()}
        lists = {name for name, default in self.metric._defaults.items() if isinstance(default, list)}
        given = {name: [tensor] if name in lists else tensor for name, tensor in tensors.items()}
        with self.entry.named(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The ``compute`` method")  # it warns if this rank had no samples
            self.metric.reset()
            self.metric.load_state_dict(given, strict=False)
            return as_curve(self.metric, to_host(self.metric.compute()))


def reduction_of(entry: Entry, name: str) -> Callable[[Any, Any], Any]:
    """Returns the function that merges a state. Raises UserError if that would not be exact."""
    given = entry.metric._reductions.get(name)
    known = given.__name__ if inspect.isfunction(given) else str(given)
    starts_at = entry.metric._defaults[name]
    if known not in REDUCTIONS:
        kind = type(entry.metric).__name__
        raise UserError(
            f"{entry.field} of the task, {kind}, merges its state {name!r} over ranks by {known}",
            f"only {', '.join(sorted(REDUCTIONS))} give the result over all samples: write it as an hpctrain.Metric",
        )
    if known == "dim_zero_sum" and isinstance(starts_at, torch.Tensor) and bool(starts_at.any()):
        what = f"{entry.field} of the task sums its state {name!r} over ranks, and its initial value is not 0"
        raise UserError(what, "start it at 0: otherwise each rank adds its initial value")
    return REDUCTIONS[known]


def full_precision(outputs: Any, change: Callable[[torch.Tensor], Any] = lambda tensor: tensor) -> Any:
    """Casts half-precision tensors to float32 and applies ``change`` to each, in nested dicts, tuples and lists."""
    if isinstance(outputs, torch.Tensor):
        return change(outputs.float() if outputs.dtype in HALVES else outputs)
    if isinstance(outputs, Mapping):
        return {name: full_precision(value, change) for name, value in outputs.items()}
    return type(outputs)(full_precision(one, change) for one in outputs) if type(outputs) in (tuple, list) else outputs


def to_host(outputs: Any) -> Any:
    """Converts nested tensors to NumPy arrays, half precision to float32."""
    return full_precision(outputs, lambda tensor: tensor.numpy(force=True))


def on_host(value: Any) -> Any:
    """Converts a state to NumPy; lists are concatenated."""
    return to_host(torch.cat([torch.atleast_1d(one) for one in value]) if isinstance(value, list) else value)


POINTS = 200
"""Largest number of points of a curve: its ends, and evenly spaced points along it."""
AXES = {
    "BinaryROC": (0, "false positive rate", 1, "true positive rate"),
    "BinaryPrecisionRecallCurve": (1, "recall", 0, "precision"),
}
"""Index and label of x and of y in the result, by torchmetrics class."""


def as_curve(metric: Any, result: Any) -> Any:
    """Thins a metric's curve to at most POINTS points; returns other results unchanged."""
    kind = type(metric).__name__  # not its bases: BinaryAUROC inherits from a curve
    if kind not in AXES:
        return result
    horizontal, x_label, vertical, y_label = AXES[kind]
    x, y = (np.asarray(result[part], np.float64) for part in (horizontal, vertical))
    along = np.append(0, np.cumsum(np.abs(np.diff(x)) + np.abs(np.diff(y))))
    chosen = np.arange(len(x))
    if len(x) > POINTS:
        chosen = np.unique(np.searchsorted(along, np.linspace(0, along[-1], POINTS)).clip(max=len(x) - 1))
    return Curve(x_label, y_label, tuple(x[chosen].tolist()), tuple(y[chosen].tolist()))
