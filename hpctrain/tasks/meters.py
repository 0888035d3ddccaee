"""Which of a task's metrics keep a state, and what they get of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from hpctrain.errors import HpctrainError, UserError, kind_of
from hpctrain.tasks.user_errors import own_line, shapes, words
from hpctrain.train.metrics import Arrays, Metric, MetricState, Seen


@dataclass(frozen=True)
class Selected:
    """A metric that is not a function, and what it gets of each batch.

    Without this, a metric gets the model's output and the second of a batch's two arrays.
    """

    metric: Any
    """A ``Metric``, or one of the framework: of torchmetrics, or of ``keras.metrics``."""
    select: Callable[[Any, Any], Any]
    """select(outputs, batch) returns predictions and targets, or whatever the metric takes, such as weights behind
    them: of NumPy arrays for a ``Metric``, of tensors for one of the framework."""


@runtime_checkable
class KerasMetric(Protocol):
    """What ``keras.metrics.Metric`` promises."""

    variables: Any

    def update_state(self, *args: Any, **kwargs: Any) -> Any: ...

    def result(self) -> Any: ...

    def reset_state(self) -> None: ...


@runtime_checkable
class TorchMetric(Protocol):
    """What ``torchmetrics.Metric`` promises."""

    _defaults: Mapping[str, Any]
    _reductions: Mapping[str, Any]
    metric_state: Mapping[str, Any]

    def update(self, *args: Any, **kwargs: Any) -> None: ...

    def compute(self) -> Any: ...

    def reset(self) -> None: ...


@runtime_checkable
class Updated(Protocol):
    """Something with a state, of whatever kind."""

    def update(self, *args: Any) -> Any: ...

    def compute(self, *args: Any) -> Any: ...


def is_stateful(metric: Any) -> bool:
    """Whether a task's metric is an object with a state, not a function that gives a mean."""
    return not isinstance(metric, type) and isinstance(metric, (Selected, Metric, KerasMetric, TorchMetric, Updated))


def second_array(outputs: Any, batch: Mapping[str, Any]) -> tuple[Any, Any]:
    """The output, and the target of a batch of two arrays; raises UserError for any other."""
    if len(batch) != 2 or isinstance(outputs, (Mapping, tuple, list)):
        told = f"several outputs ({type(outputs).__name__})" if len(batch) == 2 else f"batches of {', '.join(batch)}"
        raise UserError(
            f"it compares the model's output with the second of two arrays, and there are {told}",
            "pick what it gets: hpctrain.Selected(metric, lambda outputs, batch: (outputs, batch['y']))",
        )
    return outputs, list(batch.values())[1]


@dataclass(frozen=True)
class Entry:
    """One metric with a state, as the task gives it."""

    field: str
    """Of the task: ``metrics['auc']``."""
    metric: Any
    select: Callable[[Any, Any], Any]

    def arguments(self, outputs: Any, batch: Mapping[str, Any]) -> tuple[Any, ...]:
        """What the metric gets of a batch."""
        found = self.select(outputs, batch)
        if not isinstance(found, (tuple, list)):
            what = f"the function of {self.field} returned {kind_of(found)}"
            raise UserError(what, "return a tuple: (predictions, targets)")
        return tuple(found)

    @contextmanager
    def named(self, batch: Mapping[str, Any] | None = None) -> Iterator[None]:
        """Errors in the body name the metric, and the user's line."""
        try:
            yield
        except UserError as error:
            own = error.what if self.field in error.what else f"{self.field}: {error.what}"
            raise UserError(own, error.fix) from error
        except HpctrainError:
            raise
        except Exception as error:
            what = f"{self.field} fails: {type(error).__name__}: {words(error)}{own_line(error)}"
            told = f"of a dict of {shapes(batch)}" if batch else "of a batch"
            raise UserError(what, f"say what it gets {told} with hpctrain.Selected(metric, function)") from error


def entries_of(metrics: Mapping[str, Any]) -> dict[str, Entry]:
    """Those that are no functions, by name."""
    return {
        name: Entry(f"metrics[{name!r}]", metric.metric, metric.select)
        if isinstance(metric, Selected)
        else Entry(f"metrics[{name!r}]", metric, second_array)
        for name, metric in metrics.items()
        if is_stateful(metric)
    }


class MetricMeter:
    """A ``Metric`` while an evaluation lasts; see train.metrics.Meter."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.metric: Metric = entry.metric
        self.current: MetricState = {}

    def reset(self) -> None:
        with self.entry.named():
            self.current = dict(self.metric.init())

    def update(self, seen: Seen) -> None:
        with self.entry.named(seen.host_batch):
            arguments = self.entry.arguments(seen.host_outputs, seen.host_batch)
            self.current = self.metric.update(self.current, *arguments)

    def state(self) -> Arrays:
        with self.entry.named():
            return self._packed(self.current)

    def merge(self, first: Arrays, second: Arrays) -> Arrays:
        with self.entry.named():
            return self._packed(self.metric.merge(self._unpacked(first), self._unpacked(second)))

    def compute(self, state: Arrays) -> Any:
        with self.entry.named():
            return self.metric.compute(self._unpacked(state))

    def _packed(self, state: MetricState) -> Arrays:
        """Lists joined; empty ones are left out."""
        parts = {name: value for name, value in state.items() if not isinstance(value, list) or value}
        arrays = {
            name: np.concatenate(list(map(np.atleast_1d, value))) if isinstance(value, list) else np.asarray(value)
            for name, value in parts.items()
        }
        for name, array in arrays.items():
            if array.dtype.kind not in "biufc":
                fix = "keep arrays of numbers, or lists of them"
                raise UserError(f"its state {name!r} has dtype {array.dtype}", fix)
        return arrays

    def _unpacked(self, arrays: Arrays) -> MetricState:
        empty = self.metric.init()
        given = {name: [array] if isinstance(empty.get(name), list) else array for name, array in arrays.items()}
        return empty | given


def meter_of(entry: Entry, native: type, library: str) -> MetricMeter | None:
    """Of a ``Metric``; None for the framework's own.

    Args:
        entry: what the task gives.
        native: KerasMetric or TorchMetric, whichever the task's framework has.
        library: its name.

    Raises:
        UserError: it is neither.
    """
    if isinstance(entry.metric, Metric) and not isinstance(entry.metric, type):
        return MetricMeter(entry)
    if isinstance(entry.metric, native) and not isinstance(entry.metric, type):
        return None
    if isinstance(entry.metric, type):
        fix = f"make an object of it: {entry.metric.__name__}()"
        raise UserError(f"{entry.field} of the task is {kind_of(entry.metric)}", fix)
    lacking = [name for name in ("init", "update", "merge", "compute") if name not in dir(entry.metric)]
    raise UserError(
        f"{entry.field} of the task is {kind_of(entry.metric)}, which is not a metric of {library}, nor an "
        f"hpctrain.Metric without {', '.join(lacking)}",
        f"give a function(outputs, batch), a metric of {library}, or an object with init, update, merge and compute",
    )
