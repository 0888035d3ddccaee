"""Single samples as users' code gives and transforms them, and arrays of many with a sample axis."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.dataset import Dataset, Field, Samples, read_exclusively
from hpctrain.data.order import Stream, keyed_generator
from hpctrain.errors import UserError

Sample = dict[str, NDArray[Any]]
"""The arrays of one sample."""
Transform = Callable[[dict[str, Any], np.random.Generator], Mapping[str, Any]]
"""transform(sample, rng) of a sample's arrays, which it may change; rng is keyed by (seed, epoch, sample)."""


def read_and_transform(
    dataset: Dataset, transform: Transform | None, seed: int, epoch: int, ids: NDArray[np.int64]
) -> Samples:
    """Reads these samples and transforms each; no samples give no arrays.

    Raises:
        UserError: the transform failed, or gave samples that differ in shape or dtype; names the sample.
    """
    samples = read_exclusively(dataset, ids) if len(ids) else {}
    if transform is None or not samples:
        return samples
    transformed = (
        transform_one(transform, {name: array[row] for name, array in samples.items()}, seed, epoch, sample_id)
        for row, sample_id in enumerate(ids.tolist())
    )
    return stack(transformed, ids.tolist(), "the transform")


def transform_one(transform: Transform, sample: Sample, seed: int, epoch: int, sample_id: int) -> Sample:
    """The transformed sample; raises UserError naming it."""
    try:
        return named(transform(sample, keyed_generator(seed, epoch, Stream.TRANSFORM, sample_id)), None)
    except Exception as error:
        raise UserError(
            f"the transform failed on sample {sample_id} in epoch {epoch}: {with_place(error)}",
            "correct the transform, or the sample",
        ) from error


def named(sample: Any, names: tuple[str, ...] | None) -> Sample:
    """A sample's arrays: a mapping keeps its names; the parts of a tuple are ``names``, by default x and y."""
    if isinstance(sample, Mapping):
        return {name: np.asarray(sample[name]) for name in names or sample}
    parts = list(sample) if isinstance(sample, (tuple, list)) else [sample]
    names = names or ("x", "y")[: len(parts)]
    if len(names) != len(parts):
        raise UserError(
            f"a sample has {len(parts)} parts, for which there are {len(names)} names",
            "name them all: open_dataset(..., fields=(...))",
        )
    return {name: np.asarray(part) for name, part in zip(names, parts, strict=True)}


def stack(
    samples: Iterable[Sample], ids: Sequence[int], giver: str, fields: Mapping[str, Field] | None = None
) -> Samples:
    """The samples along a new first axis.

    Args:
        samples: one for each of ``ids``.
        ids: for errors.
        giver: who makes the samples, for errors.
        fields: what each must be; by default what the first is.

    Raises:
        UserError: a sample is different.
    """
    batch: Samples = {}
    for row, (sample_id, sample) in enumerate(zip(ids, samples, strict=True)):
        given = {name: Field(value.shape, value.dtype) for name, value in sample.items()}
        fields = fields or given
        if given != fields:
            raise UserError(
                f"{giver} gives {layout(given)} for sample {sample_id} where {layout(fields)} was expected",
                "make the names, shapes and dtypes of all samples equal: crop, pad or cast",
            )
        if row == 0:
            batch = {name: np.empty((len(ids), *field.shape), field.dtype) for name, field in fields.items()}
        for name, value in sample.items():
            batch[name][row] = value
    return batch


def layout(fields: Mapping[str, Field]) -> str:
    """The fields as a person writes them: ``image float32[3, 32, 32], label int64``."""
    return ", ".join(f"{name} {f.dtype}{list(f.shape) or ''}" for name, f in fields.items()) or "nothing"


def with_place(error: BaseException) -> str:
    """The error and where it arose: ``ValueError: bad angle (augment.py:12 in rotate)``."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"
