"""Data with everything random in it, for tests that resume."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

SAMPLES = 112


def data(count: int = SAMPLES) -> dict[str, np.ndarray]:
    """float32 points, int64 labels, and each sample's number."""
    rng = np.random.default_rng(3)
    points = rng.normal(size=(count, 12)).astype(np.float32)
    return {"x": points, "y": points[:, :3].argmax(1).astype(np.int64), "id": np.arange(count)}


def augment(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Noise from the generator that is meant for it."""
    return sample | {"x": sample["x"] + 0.1 * rng.normal(size=12).astype(np.float32)}


def global_noise() -> float:
    """From the generators of Python and NumPy that everybody shares."""
    return 1 + 0.01 * (random.random() + float(np.random.random()))
