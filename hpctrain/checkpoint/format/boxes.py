"""Boxes in an array: positions of parts of a tensor, their overlaps, and the boxes in a range of bytes.

Pure index arithmetic. A box without axes belongs to a scalar and has one element.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Coordinates = tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """Elements ``begin[i]`` to ``begin[i] + shape[i] - 1`` along each axis i."""

    begin: Coordinates
    shape: Coordinates

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def end(self) -> Coordinates:
        """Exclusive end along each axis."""
        return tuple(map(int.__add__, self.begin, self.shape))

    @property
    def index(self) -> tuple[Any, ...]:
        """Index of these elements in an array; indexing returns an array even without axes."""
        return (..., *map(slice, self.begin, self.end))

    def overlap(self, other: Box) -> Box:
        """The intersection with another box, which may be empty."""
        begin = tuple(map(max, self.begin, other.begin))
        end = map(min, self.end, other.end)
        return Box(begin, tuple(max(0, stop - first) for first, stop in zip(begin, end, strict=True)))

    def seen_from(self, origin: Coordinates) -> Box:
        """The same elements relative to another origin."""
        return Box(tuple(map(int.__sub__, self.begin, origin)), self.shape)


def everything(shape: Coordinates) -> Box:
    """The box of all elements of an array."""
    return Box((0,) * len(shape), shape)


def position(index: Coordinates, shape: Coordinates) -> int:
    """Flat index of an element in C order."""
    place = 0
    for at, length in zip(index, shape, strict=True):
        place = place * length + at
    return place


def span(box: Box, shape: Coordinates) -> tuple[int, int]:
    """Flat begin and exclusive end of a nonempty box's elements."""
    last = tuple(end - 1 for end in box.end)
    return position(box.begin, shape), position(last, shape) + 1


def run_axis(box: Box, shape: Coordinates) -> int:
    """The first axis from which on the elements of a box are contiguous in an array of this shape."""
    axis = max(0, len(shape) - 1)
    while axis and box.shape[axis] == shape[axis]:
        axis -= 1
    return axis


def boxes_between(shape: Coordinates, first: int, last: int) -> Iterator[Box]:
    """Boxes that cover the flat range ``first`` to ``last - 1`` in order; each is contiguous in memory."""
    if first >= last:
        return
    if not shape:
        yield Box((), ())
        return
    row = math.prod(shape[1:])
    (top, skipped), (bottom, taken) = divmod(first, row), divmod(last, row)
    if top == bottom:
        yield from below(top, boxes_between(shape[1:], skipped, taken))
        return
    if skipped:
        yield from below(top, boxes_between(shape[1:], skipped, row))
        top += 1
    if top < bottom:
        yield Box((top, *(0,) * (len(shape) - 1)), (bottom - top, *shape[1:]))
    yield from below(bottom, boxes_between(shape[1:], 0, taken))


def below(index: int, boxes: Iterator[Box]) -> Iterator[Box]:
    """Convert boxes of row ``index`` to boxes of the whole array."""
    return (Box((index, *box.begin), (1, *box.shape)) for box in boxes)


def tiling_problem(shape: Coordinates, boxes: Sequence[Box]) -> str | None:
    """Why boxes in an array do not cover each element exactly once, or None."""
    filled = [box for box in boxes if box.size]
    if sum(box.size for box in filled) < math.prod(shape):
        return "parts are missing"
    return "parts overlap" if len(filled) > 1 and any_overlap(filled) else None


def any_overlap(boxes: Sequence[Box]) -> bool:
    """Whether any two nonempty boxes overlap; boxes that are disjoint along the sort axis are not compared."""
    axes = len(boxes[0].begin)
    if not axes:
        return len(boxes) > 1
    begins = np.array([box.begin for box in boxes], dtype=np.int64)
    ends = begins + np.array([box.shape for box in boxes], dtype=np.int64)
    axis = max(range(axes), key=lambda each: np.unique(begins[:, each]).size)
    order = np.argsort(begins[:, axis], kind="stable")
    begins, ends = begins[order], ends[order]
    reach = np.searchsorted(begins[:, axis], ends[:, axis])  # number of boxes that begin before each box ends
    for index, stop in enumerate(reach.tolist()):
        if stop == index + 1:
            continue
        others = slice(index + 1, stop)
        if np.any(np.all((begins[others] < ends[index]) & (begins[index] < ends[others]), axis=1)):
            return True
    return False
