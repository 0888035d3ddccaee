"""Reading samples and transforming each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.dataset import Dataset, Samples, read
from hpctrain.data.random import Stream, generator
from hpctrain.data.samples import Sample, describe, named, stack
from hpctrain.errors import UserError

Transform = Callable[[dict[str, Any], np.random.Generator], Mapping[str, Any]]
"""transform(sample, rng) of a sample's arrays, which it may change; rng is keyed by (seed, epoch, sample)."""


def load(dataset: Dataset, transform: Transform | None, seed: int, epoch: int, ids: NDArray[np.int64]) -> Samples:
    """Reads these samples and transforms each; no samples give no arrays.

    Raises:
        UserError: the transform failed, or gave samples that differ in shape or dtype; names the sample.
    """
    samples = read(dataset, ids) if len(ids) else {}
    if transform is None or not samples:
        return samples
    transformed = (
        apply(transform, {name: array[row] for name, array in samples.items()}, seed, epoch, sample_id)
        for row, sample_id in enumerate(ids.tolist())
    )
    return stack(transformed, ids.tolist(), "the transform")


def apply(transform: Transform, sample: Sample, seed: int, epoch: int, sample_id: int) -> Sample:
    """The transformed sample."""
    try:
        return named(transform(sample, generator(seed, epoch, Stream.TRANSFORM, sample_id)), None)
    except Exception as error:
        raise UserError(
            f"the transform failed on sample {sample_id} in epoch {epoch}: {describe(error)}",
            "correct the transform, or the sample",
        ) from error
