"""Metrics that keep state: how they are recognized, what they get from a batch, and the meter for ``Metric``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np

from hpctrain.errors import HpctrainError, UserError, foreign_errors, kind_of
from hpctrain.system.user_errors import own_line, shapes, words
from hpctrain.train.metrics import Arrays, Meter, Metric, MetricState, Seen, is_taken


@dataclass(frozen=True)
class Selected:
    """A metric object together with a function that selects what it gets from each batch.

    Without it, a metric object gets the model's output and the second of a batch's two arrays.
    """

    metric: Any
    """A ``Metric``, or a metric of torchmetrics or ``keras.metrics``."""
    select: Callable[[Any, Any], Any]
    """select(outputs, batch) returns a tuple of the metric's arguments: predictions, targets and, for example, weights.
    Outputs and batch are NumPy arrays for a ``Metric``, and tensors for a metric of the framework."""


@runtime_checkable
class KerasMetric(Protocol):
    """The interface of ``keras.metrics.Metric``."""

    variables: Any

    def update_state(self, *args: Any, **kwargs: Any) -> Any: ...

    def result(self) -> Any: ...

    def reset_state(self) -> None: ...


@runtime_checkable
class TorchMetric(Protocol):
    """The interface of ``torchmetrics.Metric``."""

    _defaults: Mapping[str, Any]
    _reductions: Mapping[str, Any]
    metric_state: Mapping[str, Any]

    def update(self, *args: Any, **kwargs: Any) -> None: ...

    def compute(self) -> Any: ...

    def reset(self) -> None: ...


@runtime_checkable
class Updated(Protocol):
    """Any object with ``update`` and ``compute``, treated as a metric that keeps state."""

    def update(self, *args: Any) -> Any: ...

    def compute(self, *args: Any) -> Any: ...


def is_stateful(metric: Any) -> bool:
    """Whether a task's metric is an object that keeps state, rather than a function that returns a mean."""
    return not isinstance(metric, type) and isinstance(metric, (Selected, Metric, KerasMetric, TorchMetric, Updated))


def second_array(outputs: Any, batch: Mapping[str, Any]) -> tuple[Any, Any]:
    """The output and the second of a batch's two arrays; raises UserError for other batches or several outputs."""
    if len(batch) != 2 or isinstance(outputs, (Mapping, tuple, list)):
        given = f"several outputs ({type(outputs).__name__})" if len(batch) == 2 else f"batches of {', '.join(batch)}"
        raise UserError(
            f"it compares the model's output with the second of two arrays, and there are {given}",
            "select what it gets: hpctrain.Selected(metric, lambda outputs, batch: (outputs, batch['y']))",
        )
    return outputs, list(batch.values())[1]


@dataclass(frozen=True)
class Entry:
    """A metric of the task that keeps state."""

    field: str
    """The task's field: ``metrics['auc']``."""
    metric: Any
    select: Callable[[Any, Any], Any]

    def arguments(self, outputs: Any, batch: Mapping[str, Any]) -> tuple[Any, ...]:
        """The metric's arguments for a batch."""
        found = self.select(outputs, batch)
        if not isinstance(found, (tuple, list)):
            what = f"the function of {self.field} returned {kind_of(found)}"
            raise UserError(what, "return a tuple: (predictions, targets)")
        return tuple(found)

    @contextmanager
    def named(self, batch: Mapping[str, Any] | None = None) -> Iterator[None]:
        """Turn errors in the body into UserErrors that name the metric and the user's line."""
        try:
            yield
        except UserError as error:
            own = error.what if self.field in error.what else f"{self.field}: {error.what}"
            raise UserError(own, error.fix) from error
        except HpctrainError:
            raise
        except Exception as error:
            what = f"{self.field} fails: {type(error).__name__}: {words(error)}{own_line(error)}"
            given = f"of a dict of {shapes(batch)}" if batch else "of a batch"
            raise UserError(what, f"say what it gets {given} with hpctrain.Selected(metric, function)") from error


def entries_of(metrics: Mapping[str, Any]) -> dict[str, Entry]:
    """The metrics that keep state, by name."""
    found = {}
    for name, metric in metrics.items():
        if is_stateful(metric):
            own, select = (metric.metric, metric.select) if isinstance(metric, Selected) else (metric, second_array)
            found[name] = Entry(f"metrics[{name!r}]", own, select)
    return found


def require_metrics(names: Sequence[str], metrics: Mapping[str, Any]) -> None:
    """Raises UserError if ``train.metrics`` has other names than these metrics, or one that a step's report has."""
    if taken := next(filter(is_taken, names), None):
        raise UserError(f"train.metrics has {taken!r}, which each step reports", "give the metric another name")
    unknown = next((name for name in names if name not in metrics), None)
    if unknown is not None:
        fix = f"name one of {', '.join(sorted(metrics))}" if metrics else "give the task metrics="
        raise UserError(f"train.metrics has {unknown!r}, and the task has no such metric", fix)


def copy_of_metric(metric: Any) -> Any:
    """A metric for training batches, whose state is not that of the given one: evaluations begin that again."""
    if isinstance(metric, Selected):
        return replace(metric, metric=copy_of_metric(metric.metric))
    if not is_stateful(metric):
        return metric

    def failed(error: Exception) -> UserError:
        fix = "let copy.deepcopy copy it: Keras does that with what @keras.saving.register_keras_serializable() names"
        return UserError(f"train.metrics: {kind_of(metric)} cannot be copy_of_metric: {error}", fix)

    with foreign_errors(failed):
        return copy.deepcopy(metric)


class MetricMeter:
    """The state of a ``Metric`` during an evaluation; see train.metrics.Meter."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.metric: Metric = entry.metric
        self.reset()

    def reset(self) -> None:
        with self.entry.named():
            self.current: MetricState = dict(self.metric.init())

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
        """Concatenate the lists in the state to arrays and omit empty ones."""
        arrays = {}
        for name, value in state.items():
            if isinstance(value, list):
                if not value:
                    continue
                value = np.concatenate(list(map(np.atleast_1d, value)))
            array = arrays[name] = np.asarray(value)
            if array.dtype.kind not in "biufc":
                fix = "keep arrays of numbers, or lists of them"
                raise UserError(f"its state {name!r} has dtype {array.dtype}", fix)
        return arrays

    def _unpacked(self, arrays: Arrays) -> MetricState:
        empty = self.metric.init()
        given = {name: [array] if isinstance(empty.get(name), list) else array for name, array in arrays.items()}
        return empty | given


def meters_of(
    metrics: Mapping[str, Any], native: type, library: str, adapt: Callable[[Entry], Meter]
) -> dict[str, Meter]:
    """Meters of a task's metrics that keep state; ``adapt`` makes one of a metric of the framework's library.

    Raises:
        UserError: an entry has some methods of a metric and lacks others, or belongs to another library.
    """
    return {name: meter_of(entry, native, library) or adapt(entry) for name, entry in entries_of(metrics).items()}


def meter_of(entry: Entry, native: type, library: str) -> MetricMeter | None:
    """The meter of a ``Metric``; None for a metric of the framework.

    Args:
        entry: the task's metric.
        native: KerasMetric or TorchMetric, according to the task's framework.
        library: name of the library with such metrics.

    Raises:
        UserError: the metric is neither.
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
