"""All gradients of a model as one array. Pure arithmetic; imports nothing of TensorFlow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

ROW = 16
"""Numbers of a row: 64 bytes of float32, TensorFlow's alignment, so that it cuts off whole rows without copying."""


@dataclass(frozen=True)
class FlatLayout:
    """float32[rows, 16]: every gradient begins on a row of its own, and the last row holds sums beside the gradients."""

    shapes: tuple[tuple[int, ...], ...]
    """Of the gradients, in the model's order."""

    @property
    def sizes(self) -> list[int]:
        """Numbers in each gradient."""
        return [math.prod(shape) for shape in self.shapes]

    @property
    def rows_each(self) -> list[int]:
        """Rows of each gradient, then 1 for the last row."""
        return [-(-size // ROW) for size in self.sizes] + [1]

    @property
    def rows(self) -> int:
        """Rows in all."""
        return sum(self.rows_each)

    @property
    def paddings(self) -> list[int]:
        """Zeros behind each gradient."""
        return [-size % ROW for size in self.sizes]


def layout_of(shapes: Sequence[Sequence[int]]) -> FlatLayout:
    """The layout of gradients of these shapes."""
    return FlatLayout(tuple(tuple(int(n) for n in shape) for shape in shapes))
