"""Reading a part of a batch and transforming its samples."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.dataset import Dataset, Samples
from hpctrain.data.random import Stream, generator
from hpctrain.errors import HpctrainError, UserError

Transform = Callable[[dict[str, Any], np.random.Generator], Mapping[str, Any]]
"""transform(sample, rng) of a sample's arrays, which it may change; rng is keyed by (seed, epoch, sample)."""


def load(dataset: Dataset, transform: Transform | None, seed: int, epoch: int, ids: NDArray[np.int64]) -> Samples:
    """Reads these samples and transforms each; no samples give no arrays."""
    if not len(ids):
        return {}
    samples = dataset.read(ids)
    if transform is None:
        return samples
    transformed: Samples = {}
    for row, sample_id in enumerate(ids.tolist()):
        sample = {name: array[row] for name, array in samples.items()}
        rng = generator(seed, epoch, Stream.TRANSFORM, sample_id)
        try:
            result = {name: np.asarray(value) for name, value in transform(sample, rng).items()}
        except HpctrainError:
            raise
        except Exception as error:
            raise UserError(
                f"the transform failed on sample {sample_id} in epoch {epoch}: {describe(error)}",
                "correct the transform, or the sample",
            ) from error
        if row == 0:
            transformed = {name: np.empty((len(ids), *value.shape), value.dtype) for name, value in result.items()}
        check_same(transformed, result, sample_id)
        for name, value in result.items():
            transformed[name][row] = value
    return transformed


def check_same(batch: Samples, sample: Samples, sample_id: int) -> None:
    """Raises UserError where a transformed sample cannot stand beside the first of its batch."""
    expected = {name: (array.shape[1:], array.dtype) for name, array in batch.items()}
    given = {name: (value.shape, value.dtype) for name, value in sample.items()}
    if given != expected:
        raise UserError(
            f"the transform gives {layout(given)} for sample {sample_id} but {layout(expected)} for others",
            "let it give the same names, shapes and dtypes for every sample: crop, pad or cast",
        )


def layout(arrays: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]) -> str:
    """The names, dtypes and shapes as a person writes them."""
    return ", ".join(f"{name} {dtype}{list(shape)}" for name, (shape, dtype) in arrays.items()) or "nothing"


def describe(error: BaseException) -> str:
    """The error and where it arose: ``ValueError: bad angle (augment.py:12 in rotate)``."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"
