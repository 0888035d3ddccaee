"""Metrics that are not means, and how their state is kept over the batches and ranks of an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import numpy as np

from hpctrain.errors import UserError, kind_of
from hpctrain.run.events import Train
from hpctrain.run.figures import Curve, Figure, Matrix, is_drawable
from hpctrain.system.array_types import Array, Floats

Arrays = Mapping[str, Array]
"""State as it is sent between ranks."""
MetricState = dict[str, Any]
"""State of a ``Metric``, by name: NumPy arrays, or lists of arrays, which are joined along the first axis when sent."""
MOST_VALUES = 100
"""Limit on the numbers that one metric may report."""


@runtime_checkable
class Metric(Protocol):
    """A metric that is not a mean over samples. The object itself is stateless: an evaluation begins with ``init``.

    Arrays are NumPy arrays on the host, whatever the framework. ``update`` gets what the task's ``Selected`` picks from
    outputs and batch; by default the model's output and the second of the batch's two arrays.
    """

    def init(self) -> MetricState:
        """The state before any sample: arrays of numbers, or lists of them, by name."""

    def update(self, state: MetricState, *arrays: Any) -> MetricState:
        """The state after one more batch; ``state`` may be changed in place.

        Args:
            state: from ``init`` or ``update``.
            arrays: predictions and targets of the batch, or whatever else ``Selected`` picks.
        """

    def merge(self, first: MetricState, second: MetricState) -> MetricState:
        """The state that one process would have after the samples of both; either may be changed in place.

        Args:
            first: state over samples that come before those of ``second`` in the validation data.
            second: state of another rank.
        """

    def compute(self, state: MetricState) -> Any:
        """The result: a number, a ``Curve`` or a ``Matrix``; or a dict of these by name, or a sequence of numbers.

        Called on one rank, with the state of all samples.
        """


@dataclass
class Seen:
    """A batch and the model's outputs for it."""

    outputs: Any
    """Tensors of the framework."""
    batch: Mapping[str, Any]
    """The batch, as tensors of the framework."""
    host_batch: Arrays
    """The same batch in NumPy."""
    to_host: Callable[[Any], Any]
    """Converts outputs to NumPy arrays."""

    @cached_property
    def host_outputs(self) -> Any:
        """The outputs in NumPy, copied once for all metrics."""
        return self.to_host(self.outputs)


class Meter(Protocol):
    """One metric of a task during an evaluation, from any library."""

    def reset(self) -> None:
        """Forgets all samples."""

    def update(self, seen: Seen) -> None:
        """Adds one batch; raises UserError naming the metric."""

    def state(self) -> Arrays:
        """State over this rank's samples. Names are the same on all ranks, but may be missing for empty states."""

    def merge(self, first: Arrays, second: Arrays) -> Arrays:
        """Combines two states; the samples of ``first`` come first."""

    def compute(self, state: Arrays) -> Any:
        """The metric's result; see ``Metric.compute``."""


@dataclass(frozen=True)
class Evaluation:
    """Results of an evaluation."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers by name."""
    figures: Mapping[str, Figure] = field(default_factory=dict)
    """Curves and matrices by name; on rank 0 only."""


def flattened(name: str, result: Any) -> Evaluation:
    """Flattens what a metric's ``compute`` returned into numbers and figures named after the metric.

    Raises:
        UserError: it is neither numbers nor a figure, or too many numbers.
    """
    numbers: dict[str, float] = {}
    figures: dict[str, Figure] = {}
    _flatten(name, result, numbers, figures)
    if len(numbers) > MOST_VALUES:
        fix = f"return at most {MOST_VALUES}, or a Curve or Matrix"
        raise UserError(f"metrics[{name!r}] gives {len(numbers)} numbers", fix)
    return Evaluation(numbers, figures)


def _flatten(name: str, result: Any, numbers: dict[str, float], figures: dict[str, Figure]) -> None:
    if isinstance(result, (Curve, Matrix)):
        if not is_drawable(result):
            raise UserError(
                f"metrics[{name!r}] gives {kind_of(result)} whose parts do not fit each other, or not finite",
                "give as many x as y, all of them finite; or a square of counts with a label for each row",
            )
        figures[name] = result
    elif isinstance(result, Mapping):
        for key, value in result.items():
            _flatten(f"{name}/{key}", value, numbers, figures)
    else:
        values = _numbers(name, result)
        if values.ndim == 0:
            numbers[name] = float(values)
        elif values.ndim == 1:
            numbers |= {f"{name}/{index}": value for index, value in enumerate(values.tolist())}
        else:
            figures[name] = Matrix(tuple(map(str, range(len(values)))), tuple(map(tuple, values.astype(int).tolist())))


def _numbers(name: str, result: Any) -> Floats:
    """Converts a result to a scalar, a vector, or a square matrix of counts; raises UserError for anything else."""
    try:
        values = np.asarray([[[]]] if result is None else result, dtype=np.float64)
    except (TypeError, ValueError):
        values = np.empty((0, 0, 0))
    is_square = values.ndim == 2 and values.shape[0] == values.shape[1] > 0 and bool((values % 1 == 0).all())
    if values.ndim < 2 or is_square:
        return values
    kind = f"{kind_of(result)}{list(values.shape) if values.size else ''}"
    raise UserError(
        f"metrics[{name!r}] gives {kind}", "return a number, a dict of numbers, hpctrain.Curve or hpctrain.Matrix"
    )


def is_taken(name: str) -> bool:
    """Whether ``train`` events have a field of this name, so that a task's own metric cannot have it."""
    return name.startswith(("grad_norm", "seconds/")) or any(field.name == name for field in fields(Train))
