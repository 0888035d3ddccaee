"""Summarizes a checkpoint's tensors and compares two checkpoints."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from hpctrain.checkpoint.reading import Loaded
from hpctrain.errors import UserError
from hpctrain.system.array_types import Array, Bytes
from hpctrain.train.saved_arrays import numbers_of
from hpctrain.train.tree import FLOATS, INTEGERS, STRUCTURE, put_together

Reads = dict[str, tuple[Callable[[], Array], str]]
"""(function that reads the array, logical type) by name."""
NUMBERS = (STRUCTURE, INTEGERS, FLOATS)
"""Names of the tensors that hold an object's state apart from its arrays."""
MOST_TEXT = 200
"""Limit on the characters of an object's state that are printed."""


@dataclass(frozen=True)
class Summary:
    """Summary of a tensor; least, mean and most are over its finite values, None if there are none."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    least: float | None
    mean: float | None
    most: float | None
    nans: int
    infinities: int
    text: str | None = None
    """An object's state as JSON, in which arrays are their names in angle brackets."""


@dataclass(frozen=True)
class Difference:
    """How a tensor differs between two checkpoints."""

    name: str
    kind: str
    """``only in the first``, ``only in the second``, ``shape``, ``type`` or ``values``."""
    largest: float | None = None
    """Largest absolute difference of finite values, for ``values``."""
    changed: int = 0
    """Number of values that differ bitwise, for ``values``."""


def numbers(array: Array, dtype: str) -> Array:
    """Convert values for arithmetic: bfloat16 to float32, others to float64 or complex128."""
    return numbers_of(array, dtype) if dtype == "bfloat16" else array.astype(np.result_type(array, np.float64))


@np.errstate(all="ignore")
def summarize(name: str, array: Array, dtype: str) -> Summary:
    """Summarize a tensor, a complex one by its magnitudes."""
    values = numbers(array, dtype)
    values = np.abs(values) if values.dtype.kind == "c" else values
    nans = int(np.isnan(values).sum())
    infinities = int(np.isinf(values).sum())
    finite = values[np.isfinite(values)] if nans or infinities else values
    if finite.size == 0:
        return Summary(name, array.shape, dtype, None, None, None, nans, infinities)
    mean = float(finite.mean(dtype=np.float64))
    if not math.isfinite(mean):
        mean = float((finite / finite.size).sum(dtype=np.float64))  # the plain sum overflows
    least, most = float(finite.min()), float(finite.max())
    return Summary(name, array.shape, dtype, least, min(max(mean, least), most), most, nans, infinities)


def tensor_summaries(loaded: Loaded, prefix: str = "") -> list[Summary]:
    """Summaries of all tensors below a prefix, sorted by name.

    For example, model/dense1/kernel and model/dense1.weight are below model/dense1.
    """
    prefix = prefix.rstrip("/")
    below = (f"{prefix}/", f"{prefix}.")
    reads, texts = all_arrays(loaded), object_texts(loaded)
    names = sorted(name for name in reads if not prefix or name == prefix or name.startswith(below))
    found = ((name, *reads[name]) for name in names)
    return [replace(summarize(name, read(), dtype), text=texts.get(name)) for name, read, dtype in found]


def all_arrays(loaded: Loaded) -> Reads:
    """Readers of all arrays in the checkpoint itself, including those of single ranks."""
    of_ranks: Reads = {
        f"{name} (rank {rank})": (partial(values.__getitem__, rank), loaded.dtypes[name])
        for name, values in loaded.of_ranks.items()
        for rank in values
    }
    own = [name for name in loaded.arrays if not loaded.source or name not in loaded.source]
    return {name: (partial(loaded.arrays.__getitem__, name), loaded.dtypes[name]) for name in own} | of_ranks


def object_texts(loaded: Loaded) -> dict[str, str]:
    """Objects' states as JSON, by the name of the structure tensor; see train.tree."""
    ranks = sorted({rank for values in loaded.of_ranks.values() for rank in values})
    views: list[tuple[str, Mapping[str, Array]]] = [("", loaded.arrays)]
    for rank in ranks:
        own = {name: values[rank] for name, values in loaded.of_ranks.items() if rank in values}
        views.append((f" (rank {rank})", own))
    texts = {}
    for suffix, arrays in views:
        for name in arrays:
            group, _, last = name.rpartition("/")
            if last == STRUCTURE and group:
                parts = {part: arrays[f"{group}/{part}"] for part in NUMBERS if f"{group}/{part}" in arrays}
                with suppress(UserError):
                    value = put_together(parts, lambda leaf, kind: f"<{leaf}>", group)
                    texts[name + suffix] = json.dumps(value)
    return texts


def tensor_differences(first: Loaded, second: Loaded) -> list[Difference]:
    """Tensors that are not bitwise identical in both, by name."""
    before, after = all_arrays(first), all_arrays(second)
    found = [compare(name, before, after) for name in sorted(before.keys() | after.keys())]
    return [difference for difference in found if difference]


@np.errstate(all="ignore")
def compare(name: str, first: Reads, second: Reads) -> Difference | None:
    """How one tensor differs, or None if it does not."""
    if name not in second:
        return Difference(name, "only in the first")
    if name not in first:
        return Difference(name, "only in the second")
    (read_old, old_type), (read_new, new_type) = first[name], second[name]
    before, after = read_old(), read_new()
    if before.shape != after.shape:
        return Difference(name, "shape")
    if old_type != new_type:
        return Difference(name, "type")
    if before.tobytes() == after.tobytes():
        return None
    gap = np.abs(numbers(after, new_type) - numbers(before, old_type))
    finite = gap[np.isfinite(gap)]
    changed = int((bits(before) != bits(after)).any(axis=-1).sum())
    return Difference(name, "values", float(finite.max()) if finite.size else None, changed)


def bits(array: Array) -> Bytes:
    """The bytes of an array as uint8[values, bytes per value]."""
    return np.ascontiguousarray(array).reshape(-1, 1).view(np.uint8)


def summary_tree(found: Sequence[Summary]) -> Iterator[str]:
    """Lines that show names as a tree, with the summaries in columns."""
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
    """Format type, shape and numbers of a summary."""
    text = f"{one.dtype:<9} {list(one.shape)!s:<18}"
    if one.text is not None:
        shown = one.text if len(one.text) <= MOST_TEXT else f"{one.text[:MOST_TEXT]} ..."
        return f"{text} {shown}"
    if one.mean is not None:
        text += f" min {one.least:<11.4g} mean {one.mean:<11.4g} max {one.most:<11.4g}"
    odd: Mapping[str, int] = {"NaN": one.nans, "infinite": one.infinities}
    return (text + "".join(f" {count} {kind}" for kind, count in odd.items() if count)).rstrip()
