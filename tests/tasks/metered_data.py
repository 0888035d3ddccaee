"""Samples, weights and metrics of tasks whose training metrics NumPy can compute: with a rate of 0, weights stay."""

from __future__ import annotations

from typing import Any

import numpy as np

SAMPLES, INPUTS, HIDDEN, CLASSES = 29, 4, 6, 3
_RANDOM = np.random.default_rng(5)
X = _RANDOM.normal(size=(SAMPLES, INPUTS)).astype(np.float32)
Y = _RANDOM.integers(0, CLASSES, SAMPLES)
FIRST = _RANDOM.normal(size=(INPUTS, HIDDEN)).astype(np.float32)
SECOND = _RANDOM.normal(size=(HIDDEN, CLASSES)).astype(np.float32)


def outputs() -> Any:
    """What the untrained model gives for all samples."""
    return np.tanh(X @ FIRST) @ SECOND


def largest(outputs: Any, batch: Any) -> tuple[Any, Any]:
    """Mean of the first output, weighted by the class: (sum, weight)."""
    return (outputs[:, 0] * batch["y"]).sum(), batch["y"].sum()


class Median:
    """Median of the first output, which needs every sample."""

    def init(self) -> dict[str, Any]:
        return {"seen": []}

    def update(self, state: dict[str, Any], outputs: Any, targets: Any) -> dict[str, Any]:
        return {"seen": [*state["seen"], outputs[:, 0]]}

    def merge(self, first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
        return {"seen": [*first["seen"], *second["seen"]]}

    def compute(self, state: dict[str, Any]) -> dict[str, float]:
        seen = np.concatenate(state["seen"])
        return {"value": float(np.median(seen)), "samples": len(seen)}
