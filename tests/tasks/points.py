"""Samples of the small models of both frameworks, in global batches and ranks' micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.order import part_of

Batch = dict[str, NDArray[Any]]
SAMPLES = 183
GLOBAL_BATCH = 30
"""The last batch of an epoch has 3 samples: the last of 4 ranks gets none."""


def samples() -> Batch:
    """Fixed samples: float32 points, int64 classes, float32 weights, int64 words."""
    random = np.random.default_rng(5)
    points = random.normal(size=(SAMPLES, 12)).astype(np.float32)
    weights = random.integers(0, 4, SAMPLES).astype(np.float32)
    words = random.integers(0, 50, (SAMPLES, 4))
    return {"x": points, "y": points[:, :3].argmax(1).astype(np.int64), "w": weights, "words": words}


def in_batches(everything: Batch, count: int) -> Iterator[Batch]:
    """Global batches in order, epoch after epoch."""
    starts = [*range(0, SAMPLES, GLOBAL_BATCH)]
    for step in range(count):
        begin = starts[step % len(starts)]
        yield {name: array[begin : begin + GLOBAL_BATCH] for name, array in everything.items()}


def cut(batch: Batch, rank: int, size: int, accumulate: int = 1) -> list[Batch]:
    """A rank's micro-batches of a global batch."""
    part = part_of(len(batch["x"]), rank, size)
    mine = {name: array[part] for name, array in batch.items()}
    count = len(mine["x"])
    pieces = [part_of(count, piece, accumulate) for piece in range(min(accumulate, count))]
    return [{name: array[piece] for name, array in mine.items()} for piece in pieces]
