"""Padding of samples of variable length to one shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hpctrain.data.dataset import Samples
from hpctrain.data.samples import stack
from hpctrain.errors import UserError
from hpctrain.system.array_types import Array


def pad(
    samples: Sequence[Mapping[str, Any]],
    *,
    fields: Sequence[str],
    value: float | Mapping[str, float] = 0,
    multiple_of: int = 1,
    length: int | None = None,
    mask: str | None = None,
) -> Samples:
    """Pad arrays at the end to the largest shape in the batch and stack them: a ready-made ``collate``.

    Bind the arguments with ``functools.partial(hpctrain.pad, fields=["tokens"], multiple_of=8, mask="mask")``.

    Args:
        samples: dicts of arrays; only fields that are padded may differ in shape.
        fields: names of the arrays to pad, along each axis in which they differ.
        value: the padding value, or a mapping from field name to value, with 0 for fields that it omits.
        multiple_of: round the length of the first axis up to a multiple of this. Frameworks compile once per length,
            so this keeps the number of compilations small.
        length: pad the first axis to this length in every batch, rounded up to ``multiple_of``.
        mask: name of an array to add: bool[samples, padded length], true where the first of ``fields`` has values.

    Returns:
        Arrays by name, with the samples along the first axis, in the given order.

    Raises:
        UserError: a sample lacks one of the fields, is longer than ``length``, or differs in an unpadded field.
    """
    first = samples[0]
    missing = [name for name in fields if name not in first or np.ndim(first[name]) == 0]
    if missing or not fields:
        raise UserError(
            f"pad: samples have no array {' or '.join(map(repr, missing))} with an axis to pad"
            if missing
            else "pad: no fields are named",
            f"name some of {', '.join(first)} in fields",
        )
    shapes = {name: padded_shape(name, samples, multiple_of, length) for name in fields}
    values = value if isinstance(value, Mapping) else dict.fromkeys(fields, value)
    rows = []
    for sample in samples:
        row = {name: np.asarray(array) for name, array in sample.items()}
        row |= {name: padded(row[name], shape, values.get(name, 0)) for name, shape in shapes.items()}
        rows.append(row)
    batch = stack(rows, range(len(rows)), "pad, counting in the batch,")
    if mask is not None:
        lengths = np.array([len(sample[fields[0]]) for sample in samples])
        batch[mask] = np.arange(shapes[fields[0]][0]) < lengths[:, None]
    return batch


def padded_shape(
    name: str, samples: Sequence[Mapping[str, Any]], multiple_of: int, length: int | None
) -> tuple[int, ...]:
    """The common shape to which all samples' arrays of this name are padded."""
    shapes = [np.shape(sample[name]) for sample in samples]
    if len({len(shape) for shape in shapes}) > 1:
        raise UserError(f"pad: the samples' arrays {name!r} differ in their number of axes", "give all the same number")
    longest, *others = (max(axis) for axis in zip(*shapes, strict=True))
    if length is not None and longest > length:
        what = f"pad: an array {name!r} has {longest} values along its first axis, and length is {length}"
        raise UserError(what, "truncate such samples in the transform, or give a larger length")
    return -(-(length or longest) // multiple_of) * multiple_of, *others


def padded(array: Array, shape: tuple[int, ...], value: float) -> Array:
    """Copy the array to the start of a new array of this shape, filled with ``value``."""
    result = np.full(shape, value, array.dtype)
    result[tuple(map(slice, array.shape))] = array
    return result
