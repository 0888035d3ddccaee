"""What is in a checkpoint, and what differs between two."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.checkpoint.reading import Loaded


@dataclass(frozen=True)
class Summary:
    """A tensor at a glance; numbers are over its finite values, None if there are none."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    least: float | None
    mean: float | None
    most: float | None
    nans: int
    infinities: int


@dataclass(frozen=True)
class Difference:
    """How a tensor differs between two checkpoints."""

    name: str
    kind: str
    """``only in the first``, ``only in the second``, ``shape``, ``type`` or ``values``."""
    largest: float | None = None
    """Largest absolute difference of finite values, for ``values``."""
    changed: int = 0
    """Values whose bits differ, for ``values``."""


def numbers(array: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Values to calculate with: bfloat16 as float32, complex as magnitudes, others as float64."""
    if dtype == "bfloat16" and array.dtype.kind == "u":
        return (array.astype(np.uint32) << 16).view(np.float32)
    return np.abs(array) if array.dtype.kind == "c" else array.astype(np.float64)


@np.errstate(all="ignore")
def summarize(name: str, array: NDArray[Any], dtype: str) -> Summary:
    """A tensor at a glance."""
    values = numbers(array, dtype)
    nans, infinities = int(np.isnan(values).sum()), int(np.isinf(values).sum())
    finite = values[np.isfinite(values)] if nans or infinities else values
    if finite.size == 0:
        return Summary(name, array.shape, dtype, None, None, None, nans, infinities)
    mean = float(finite.mean(dtype=np.float64))
    if not math.isfinite(mean):
        mean = float((finite / finite.size).sum(dtype=np.float64))  # the sum itself is beyond the largest number
    least, most = float(finite.min()), float(finite.max())
    return Summary(name, array.shape, dtype, least, min(max(mean, least), most), most, nans, infinities)


def tensor_summaries(loaded: Loaded, prefix: str = "") -> list[Summary]:
    """Of all tensors below a prefix, by name: below model/dense1 are model/dense1/kernel and model/dense1.weight."""
    prefix = prefix.rstrip("/")
    below = (f"{prefix}/", f"{prefix}.")
    names = sorted(name for name in loaded.arrays if not prefix or name == prefix or name.startswith(below))
    return [summarize(name, loaded.arrays[name], loaded.dtypes[name]) for name in names]


def tensor_differences(first: Loaded, second: Loaded) -> list[Difference]:
    """Tensors that are not the same bits in both, by name."""
    found = [compare(name, first, second) for name in sorted(first.arrays.keys() | second.arrays.keys())]
    return [difference for difference in found if difference]


@np.errstate(all="ignore")
def compare(name: str, first: Loaded, second: Loaded) -> Difference | None:
    """How one tensor differs, or None."""
    if name not in second.arrays:
        return Difference(name, "only in the first")
    if name not in first.arrays:
        return Difference(name, "only in the second")
    before, after = first.arrays[name], second.arrays[name]
    if before.shape != after.shape:
        return Difference(name, "shape")
    if first.dtypes[name] != second.dtypes[name]:
        return Difference(name, "type")
    if before.tobytes() == after.tobytes():
        return None
    gap = np.abs(numbers(after, second.dtypes[name]) - numbers(before, first.dtypes[name]))
    finite = gap[np.isfinite(gap)]
    changed = int((bits(before) != bits(after)).any(axis=-1).sum())
    return Difference(name, "values", float(finite.max()) if finite.size else None, changed)


def bits(array: NDArray[Any]) -> NDArray[np.uint8]:
    """uint8[values, bytes of a value]."""
    return np.ascontiguousarray(array).reshape(-1, 1).view(np.uint8)


def summary_tree(found: Sequence[Summary]) -> Iterator[str]:
    """Lines that show names as a tree, groups before their tensors, with the numbers in columns."""
    width = max([2 * one.name.count("/") + len(one.name.rpartition("/")[2]) for one in found], default=0)
    shown: tuple[str, ...] = ()
    for one in found:
        *groups, leaf = one.name.split("/")
        common = next(
            (i for i, (a, b) in enumerate(zip(shown, groups, strict=False)) if a != b), min(len(shown), len(groups))
        )
        for depth in range(common, len(groups)):
            yield f"{'  ' * depth}{groups[depth]}/"
        shown = tuple(groups)
        label = f"{'  ' * len(groups)}{leaf}"
        yield f"{label:<{width}}  {describe(one)}"


def describe(one: Summary) -> str:
    """Type, shape and numbers of a tensor."""
    text = f"{one.dtype:<9} {list(one.shape)!s:<18}"
    if one.mean is not None:
        text += f" min {one.least:<11.4g} mean {one.mean:<11.4g} max {one.most:<11.4g}"
    odd: Mapping[str, int] = {"NaN": one.nans, "infinite": one.infinities}
    return (text + "".join(f" {count} {kind}" for kind, count in odd.items() if count)).rstrip()
