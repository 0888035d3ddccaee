"""Assigns rows of parameters to the ranks that update them: pure index arithmetic over the flat gradient buffer.

Each rank gets one contiguous range of the buffer. Ranges end between rows of a tensor (its first axis), as checkpoint
shards do, or between tensors if an optimizer needs them whole.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hpctrain.reduce.flat_layout import Layout


@dataclass(frozen=True)
class ShardedParameter:
    """Size of a parameter to shard."""

    rows: int
    """Number of rows it can be split into; 1 if it must have one owner."""
    num_bytes: int
    """Its weight in the division; 0 if no optimizer updates it."""


@dataclass(frozen=True)
class RowRange:
    """Rows of a parameter that one rank updates."""

    parameter: int
    """Index of the parameter."""
    owner: int
    """Rank that updates these rows."""
    begin: int
    """First row."""
    end: int
    """One past the last row."""
    rows: int
    """Total rows of the parameter; 1 if this is all of it."""

    def of(self, whole: Any) -> Any:
        """Selects these rows of a tensor or an array."""
        return whole if self.rows == 1 else whole[self.begin : self.end]


@dataclass(frozen=True)
class RowShares:
    """What each rank updates."""

    ranges: tuple[slice, ...]
    """Adjacent ranges of the flat buffer, by rank, which cover all gradients and their padding."""
    pieces: tuple[RowRange, ...]
    """In buffer order; together they cover all rows of all parameters."""


def share_out(layout: Layout, parameters: Sequence[ShardedParameter], ranks: int) -> RowShares:
    """Divides the update into nearly equal numbers of bytes, cutting at the row or tensor nearest to the ideal place.

    Args:
        layout: layout of the flat buffer.
        parameters: in the order of the layout's offsets.
        ranks: number of ranks that split the update.
    """
    order = sorted(range(len(parameters)), key=lambda index: layout.offsets[index])
    ends = list(itertools.accumulate(parameters[index].num_bytes for index in order))
    cuts = [(0, 0)]
    """(place in the order, row) of each rank's first row."""
    for number in range(1, ranks):
        cuts.append(max(cuts[-1], _nearest(order, parameters, ends, number, ranks)))
    cuts.append((len(order), 0))
    pieces = []
    for owner, ((first, row), (last, end_row)) in enumerate(itertools.pairwise(cuts)):
        for place in range(first, min(last + 1, len(order))):
            index = order[place]
            rows = parameters[index].rows
            begin = row if place == first else 0
            end = end_row if place == last else rows
            if begin < end:
                pieces.append(RowRange(index, owner, begin, end, rows))
    positions = [_position(layout, order, parameters, cut) for cut in cuts]
    return RowShares(tuple(itertools.starmap(slice, itertools.pairwise(positions))), tuple(pieces))


def part_of_rows(rows: int, rank: int, size: int) -> tuple[int, int]:
    """First row of a rank and one past its last; equal shares, rounded up, so the last ranks may get fewer or none."""
    share = -(-rows // size)
    return min(rank * share, rows), min((rank + 1) * share, rows)


def _nearest(
    order: Sequence[int], parameters: Sequence[ShardedParameter], ends: Sequence[int], number: int, ranks: int
) -> tuple[int, int]:
    """The (place, row) before which the bytes are nearest to number/ranks of the total; integers, so that ranks agree.

    ``ends`` are cumulative bytes by place, searched by bisection, since there may be very many ranks.
    """
    target = ends[-1] * number if ends else 0
    place = bisect_right(ends, target // ranks)
    if place == len(order):
        return place, 0
    rows = parameters[order[place]].rows
    size = parameters[order[place]].num_bytes * ranks
    before = ends[place] * ranks - size
    row = (2 * (target - before) * rows + size) // (2 * size)
    return (place, row) if row < rows else (place + 1, 0)


def _position(
    layout: Layout, order: Sequence[int], parameters: Sequence[ShardedParameter], cut: tuple[int, int]
) -> int:
    """Position of a cut in the flat buffer."""
    place, row = cut
    if place == len(order):
        return layout.gradients
    index = order[place]
    return layout.offsets[index] + row * (layout.sizes[index] // parameters[index].rows)
