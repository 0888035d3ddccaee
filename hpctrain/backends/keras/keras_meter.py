"""Keras' metrics, whose state is summed over the ranks."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from hpctrain.errors import UserError
from hpctrain.tasks.meters import Entry
from hpctrain.train.metrics import Arrays, Seen


class KerasMeter:
    """See train.metrics.Meter. Variables are summed over ranks, as is correct for all built-in Keras metrics.

    Additivity is checked on the first batch: the same batch twice must double the variables.
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
        """The metric's variables; some may be missing before its first batch."""
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
                raise UserError(
                    f"{self.entry.field} of the task, {type(self.metric).__name__}, keeps {variable.name!r}, which is "
                    "not a sum over samples: those of several ranks do not add up",
                    "write it as an hpctrain.Metric, whose merge combines the states of two ranks",
                )


def to_host(value: Any) -> Any:
    """Converts the tensors of a nested structure to NumPy arrays."""
    return keras.tree.map_structure(
        lambda one: keras.ops.convert_to_numpy(one) if keras.ops.is_tensor(one) else one, value
    )
