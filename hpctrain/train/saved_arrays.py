"""Saved values that are read on demand, whole or in part."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hpctrain.system.array_types import Array


class SavedArrays(Mapping[str, Array]):
    """Saved values by name, which may be read and verified only on access.

    Each access may read the value again: use ``shape_of`` for shapes, and iterate over names.

    Args:
        named: maps each name to whatever its value is read from.
    """

    def __init__(self, named: Mapping[str, Any]) -> None:
        self.named = named

    def __getitem__(self, name: str) -> Array:
        shape = self.shape_of(name)
        return self.part(name, (0,) * len(shape), shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.named)

    def __len__(self) -> int:
        return len(self.named)

    def __contains__(self, name: object) -> bool:
        """Whether there is a tensor of this name; reads no values."""
        return name in self.named

    @abstractmethod
    def shape_of(self, name: str) -> tuple[int, ...]:
        """Shape of the whole tensor. Raises KeyError."""

    @abstractmethod
    def dtype_of(self, name: str) -> np.dtype[Any]:
        """Dtype of its values as they are read. Raises KeyError."""

    def is_current(self, name: str) -> bool:
        """Whether the framework's tensor of this name already has the value, so that it need not be loaded."""
        return False

    @abstractmethod
    def part(self, name: str, begin: tuple[int, ...], shape: tuple[int, ...]) -> Array:
        """Reads part of a tensor, however it was sharded when it was saved.

        Args:
            name: name of the tensor.
            begin: index of the first value, per axis.
            shape: shape of the part; lengths may be 0.

        Raises:
            KeyError: there is no such tensor.
            ValueError: the part is not inside the tensor.
        """


class HeldArrays(SavedArrays):
    """Whole tensors in memory."""

    named: Mapping[str, Array]

    def __getitem__(self, name: str) -> Array:
        return self.named[name]

    def shape_of(self, name: str) -> tuple[int, ...]:
        return self.named[name].shape

    def dtype_of(self, name: str) -> np.dtype[Any]:
        return self.named[name].dtype

    def part(self, name: str, begin: tuple[int, ...], shape: tuple[int, ...]) -> Array:
        require_inside(name, begin, shape, self.named[name].shape)
        slices: tuple[Any, ...] = tuple(slice(first, first + count) for first, count in zip(begin, shape, strict=True))
        found: Array = self.named[name][(..., *slices)]
        return found


Place = tuple[SavedArrays, str]
"""A source of values, and the name of the value there."""


class DerivedArrays(SavedArrays):
    """Values of other sources, renamed or converted when read.

    Args:
        places: where each value comes from, by its name here.
        change: ``change(name, value)`` converts a value or part of one, keeping its shape.
    """

    named: Mapping[str, Place]

    def __init__(
        self,
        places: Mapping[str, Place],
        change: Callable[[str, Array], Array] = lambda name, value: value,
    ) -> None:
        super().__init__(places)
        self.change = change

    def shape_of(self, name: str) -> tuple[int, ...]:
        source, there = self.named[name]
        return source.shape_of(there)

    def dtype_of(self, name: str) -> np.dtype[Any]:
        source, there = self.named[name]
        return self.change(name, np.empty(0, source.dtype_of(there))).dtype

    def is_current(self, name: str) -> bool:
        source, there = self.named[name]
        return source.is_current(there)

    def part(self, name: str, begin: tuple[int, ...], shape: tuple[int, ...]) -> Array:
        source, there = self.named[name]
        return self.change(name, source.part(there, begin, shape))


def runs_of_rows(shape: Sequence[int], row_bytes: int, block_bytes: int) -> Iterator[tuple[int, int]]:
    """Yields (first, count) of consecutive rows that take at most ``block_bytes``, but at least one row each."""
    count = max(1, block_bytes // max(1, row_bytes))
    for first in range(0, shape[0], count):
        yield first, min(count, shape[0] - first)


def lies_in(begin: Sequence[int], shape: Sequence[int], whole: Sequence[int]) -> bool:
    """Whether a part is within a tensor of this shape."""
    return len(begin) == len(shape) == len(whole) and all(
        first >= 0 and 0 <= count <= length - first for first, count, length in zip(begin, shape, whole, strict=True)
    )


def require_inside(name: str, begin: tuple[int, ...], shape: tuple[int, ...], whole: tuple[int, ...]) -> None:
    """Raises ValueError unless the part is inside the tensor."""
    if not lies_in(begin, shape, whole):
        raise ValueError(f"{name} has shape {list(whole)}: {list(shape)} from {list(begin)} on is not within it")


def as_saved(arrays: Mapping[str, Array]) -> SavedArrays:
    """Wraps arrays as SavedArrays, so that shapes and parts can be asked for."""
    return arrays if isinstance(arrays, SavedArrays) else HeldArrays(arrays)


def merge(values: Sequence[Array], rank: int, dtype: str) -> Array:
    """Merge the rank-local values of several ranks, of a logical dtype: their common value, the mean of floating-point
    values, else one rank's value."""
    first = values[0]
    if all(value.tobytes() == first.tobytes() for value in values[1:]):
        return first
    if is_inexact(dtype) and all((one.shape, one.dtype) == (first.shape, first.dtype) for one in values):
        with np.errstate(all="ignore"):  # non-finite values stay non-finite
            numbers = [numbers_of(one, dtype) for one in values]
            return items_of(np.mean(numbers, axis=0, dtype=np.result_type(numbers[0], np.float64)), dtype)
    return values[rank % len(values)]


def is_inexact(dtype: str) -> bool:
    """Whether values of a logical dtype have a mean."""
    return dtype == "bfloat16" or np.dtype(dtype).kind in "fc"


def numbers_of(items: Array, dtype: str) -> Array:
    """The numbers that the items of a logical dtype stand for: float32 for bfloat16, which is held as uint16."""
    return np.asarray(items.astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else items


def items_of(numbers: Array, dtype: str) -> Array:
    """The items of a logical dtype that hold these numbers, rounded; the inverse of ``numbers_of``."""
    if dtype != "bfloat16":
        return numbers.astype(dtype)
    bits = numbers.astype(np.float32).view(np.uint32)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # ties to even
    return np.where(np.isnan(numbers), 0x7FC0, nearest).astype(np.uint16)
