"""Saved values, whole or in parts, read when they are asked for."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


class SavedArrays(Mapping[str, NDArray[Any]]):
    """Saved values by name, which may be read, and verified, only when they are asked for.

    Looking at a value twice may read it twice: ask ``shape_of`` for a shape, and iterate over names.

    Args:
        named: has the names, each with whatever its value is read from.
    """

    def __init__(self, named: Mapping[str, Any]) -> None:
        self.named = named

    def __iter__(self) -> Iterator[str]:
        return iter(self.named)

    def __len__(self) -> int:
        return len(self.named)

    def __contains__(self, name: object) -> bool:
        """Whether there is a tensor of this name; reads nothing."""
        return name in self.named

    @abstractmethod
    def shape_of(self, name: str) -> tuple[int, ...]:
        """Shape of a whole tensor. Raises KeyError."""

    @abstractmethod
    def dtype_of(self, name: str) -> np.dtype[Any]:
        """Type of its items, as they come. Raises KeyError."""

    def is_current(self, name: str) -> bool:
        """Whether the framework's tensor of this name has the value already, so that nothing is to be loaded."""
        return False

    @abstractmethod
    def part(self, name: str, begin: tuple[int, ...], shape: tuple[int, ...]) -> NDArray[Any]:
        """The values of a part of a tensor, wherever ranks had cut it when it was saved.

        Args:
            name: of the tensor.
            begin: index of the first value, in every axis.
            shape: of the part; lengths may be 0.

        Raises:
            KeyError: there is no such tensor.
            ValueError: the part does not lie in it.
        """


class HeldArrays(SavedArrays):
    """Over arrays in memory, each of a whole tensor."""

    named: Mapping[str, NDArray[Any]]

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.named[name]

    def shape_of(self, name: str) -> tuple[int, ...]:
        return self.named[name].shape

    def dtype_of(self, name: str) -> np.dtype[Any]:
        return self.named[name].dtype

    def part(self, name: str, begin: tuple[int, ...], shape: tuple[int, ...]) -> NDArray[Any]:
        require_inside(name, begin, shape, self.named[name].shape)
        slices: tuple[Any, ...] = tuple(slice(first, first + count) for first, count in zip(begin, shape, strict=True))
        found: NDArray[Any] = self.named[name][(..., *slices)]
        return found


Place = tuple[SavedArrays, str]
"""Where a value is, and its name there."""


class DerivedArrays(SavedArrays):
    """Values from elsewhere, under other names, or changed as they are read.

    Args:
        places: of each value, by its name here.
        change: gives what is here for what is there, whole or a part: ``change(name, value)``, of the same shape.
    """

    named: Mapping[str, Place]

    def __init__(
        self,
        places: Mapping[str, Place],
        change: Callable[[str, NDArray[Any]], NDArray[Any]] = lambda name, value: value,
    ) -> None:
        super().__init__(places)
        self.change = change

    def __getitem__(self, name: str) -> NDArray[Any]:
        source, there = self.named[name]
        return self.change(name, source[there])

    def shape_of(self, name: str) -> tuple[int, ...]:
        source, there = self.named[name]
        return source.shape_of(there)

    def dtype_of(self, name: str) -> np.dtype[Any]:
        source, there = self.named[name]
        return self.change(name, np.empty(0, source.dtype_of(there))).dtype

    def is_current(self, name: str) -> bool:
        source, there = self.named[name]
        return source.is_current(there)

    def part(self, name: str, begin: tuple[int, ...], shape: tuple[int, ...]) -> NDArray[Any]:
        source, there = self.named[name]
        return self.change(name, source.part(there, begin, shape))


def runs_of_rows(shape: Sequence[int], row_bytes: int, block_bytes: int) -> Iterator[tuple[int, int]]:
    """(first, count) of rows that together have at most this many bytes, or of one row."""
    count = max(1, block_bytes // max(1, row_bytes))
    for first in range(0, shape[0], count):
        yield first, min(count, shape[0] - first)


def lies_in(begin: Sequence[int], shape: Sequence[int], whole: Sequence[int]) -> bool:
    """Whether a part lies in a tensor of this shape."""
    return len(begin) == len(shape) == len(whole) and all(
        first >= 0 and 0 <= count <= length - first for first, count, length in zip(begin, shape, whole, strict=True)
    )


def require_inside(name: str, begin: tuple[int, ...], shape: tuple[int, ...], whole: tuple[int, ...]) -> None:
    """Raises ValueError unless a part lies in its tensor."""
    if not lies_in(begin, shape, whole):
        raise ValueError(f"{name} has shape {list(whole)}: {list(shape)} from {list(begin)} on does not lie in it")


def as_saved(arrays: Mapping[str, NDArray[Any]]) -> SavedArrays:
    """The same values, to be asked for parts and shapes."""
    return arrays if isinstance(arrays, SavedArrays) else HeldArrays(arrays)
