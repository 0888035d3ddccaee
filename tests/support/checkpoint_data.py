"""Data that uses every kind of random generator, for tests of resuming."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

SAMPLES = 112


def data(count: int = SAMPLES) -> dict[str, np.ndarray]:
    """Arrays of float32 points, int64 labels and sample ids."""
    rng = np.random.default_rng(3)
    points = rng.normal(size=(count, 12)).astype(np.float32)
    return {"x": points, "y": points[:, :3].argmax(1).astype(np.int64), "id": np.arange(count)}


def augment(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Add noise from the sample's own generator."""
    return sample | {"x": sample["x"] + 0.1 * rng.normal(size=12).astype(np.float32)}


def global_noise() -> float:
    """A factor near 1 from the global generators of Python and NumPy."""
    return 1 + 0.01 * (random.random() + float(np.random.random()))
