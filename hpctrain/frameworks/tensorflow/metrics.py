"""Metrics of Keras in a KerasTask."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hpctrain.errors import UserError
from hpctrain.tasks.definition import Task
from hpctrain.tasks.meters import Entry, KerasMetric, entries_of, meter_of
from hpctrain.train.metrics import Arrays, Meter, Seen


def keras_meters(task: Task) -> dict[str, Meter]:
    """Of the task's metrics that are no functions; raises UserError for what is no metric."""
    return {
        name: meter_of(entry, KerasMetric, "Keras") or KerasMeter(entry)
        for name, entry in entries_of(task.metrics).items()
    }


class KerasMeter:
    """See train.metrics.Meter. Variables are summed over ranks, as those of all Keras' own metrics may be.

    Whether they add up is tried on the first batch: twice the same batch must give twice the variables.
    """

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.metric: keras.metrics.Metric = entry.metric
        self.adds_up = False

    def reset(self) -> None:
        self.metric.reset_state()

    def update(self, seen: Seen) -> None:
        with self.entry.named(seen.batch):
            predictions, targets, *weights = self.entry.arguments(seen.outputs, seen.batch)
            self.metric.update_state(targets, predictions, *weights)
            if not self.adds_up:
                once = self._values()
                self.metric.update_state(targets, predictions, *weights)
                self._require_doubled(once, self._values())
                self._assign(once)
                self.adds_up = True

    def state(self) -> Arrays:
        """Of a metric that has seen no batch yet, variables may be missing."""
        return {str(number): value for number, value in enumerate(self._values())}

    def merge(self, first: Arrays, second: Arrays) -> Arrays:
        return {**first, **second, **{name: first[name] + second[name] for name in first if name in second}}

    def compute(self, state: Arrays) -> Any:
        with self.entry.named():
            self._assign([state[str(number)] for number in range(len(state))])
            return to_host(self.metric.result())

    def _values(self) -> list[Any]:
        return [np.array(variable.numpy()) for variable in self.metric.variables]

    def _assign(self, values: list[Any]) -> None:
        for variable, value in zip(self.metric.variables, values, strict=True):
            variable.assign(value)

    def _require_doubled(self, once: list[Any], twice: list[Any]) -> None:
        for variable, one, two in zip(self.metric.variables, once, twice, strict=True):
            if not np.allclose(2 * one, two, rtol=1e-4, equal_nan=True):
                kind = type(self.metric).__name__
                raise UserError(
                    f"{self.entry.field} of the task, {kind}, keeps {variable.name!r}, which is no sum over samples: "
                    "those of several ranks do not add up",
                    "write it as an hpctrain.Metric, whose merge says how states of two ranks become one",
                )


def to_host(value: Any) -> Any:
    """Tensors as NumPy arrays, in whatever structure they are."""
    return tf.nest.map_structure(lambda one: one.numpy() if isinstance(one, tf.Tensor) else one, value)
