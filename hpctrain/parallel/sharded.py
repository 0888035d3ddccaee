"""Which rows of which parameters each rank updates. Pure index arithmetic over the flat gradient buffer.

Every rank gets one range of the buffer. Ranges end between rows of a tensor (its first axis), as pieces of checkpoints
do, or between tensors where an optimizer needs them whole.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain.reduce.layout import Layout


@dataclass(frozen=True)
class Weighed:
    """A parameter, as far as it is shared out."""

    rows: int
    """Rows between which it may be cut; 1: it has one owner."""
    num_bytes: int
    """What it counts; 0 for one that no optimizer updates."""


@dataclass(frozen=True)
class Piece:
    """Rows of a parameter that one rank updates."""

    parameter: int
    """Index of the parameter."""
    owner: int
    """Rank."""
    begin: int
    """First row."""
    end: int
    """One past the last row."""
    rows: int
    """Of the parameter; 1 if this is all of it."""


@dataclass(frozen=True)
class Shares:
    """What each rank updates."""

    ranges: tuple[slice, ...]
    """Of the flat buffer, by rank: neighbours, which cover all gradients with their padding."""
    pieces: tuple[Piece, ...]
    """In the order of the buffer; together they are all rows of all parameters."""


def share_out(layout: Layout, parameters: Sequence[Weighed], ranks: int) -> Shares:
    """Shares of nearly equal bytes: each cut is at the row, or the tensor, that is nearest to the ideal place.

    Args:
        layout: of the flat buffer.
        parameters: in the order of the layout's offsets.
        ranks: that the update is shared among.
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
            begin, end = row if place == first else 0, end_row if place == last else rows
            if begin < end:
                pieces.append(Piece(index, owner, begin, end, rows))
    positions = [_position(layout, order, parameters, cut) for cut in cuts]
    return Shares(tuple(itertools.starmap(slice, itertools.pairwise(positions))), tuple(pieces))


def part_of_rows(rows: int, rank: int, size: int) -> tuple[int, int]:
    """First row of a rank, and one past its last, of equal shares, rounded up, as long as there are some."""
    share = -(-rows // size)
    return min(rank * share, rows), min((rank + 1) * share, rows)


def _nearest(
    order: Sequence[int], parameters: Sequence[Weighed], ends: Sequence[int], number: int, ranks: int
) -> tuple[int, int]:
    """The (place, row) before which the bytes are nearest to number/ranks of all; whole numbers, so that ranks agree.

    ``ends`` are the bytes up to the end of each place: looked for by halves, since there may be very many ranks.
    """
    target = ends[-1] * number if ends else 0
    place = bisect_right(ends, target // ranks)
    if place == len(order):
        return place, 0
    rows, size = parameters[order[place]].rows, parameters[order[place]].num_bytes * ranks
    before = ends[place] * ranks - size
    row = (2 * (target - before) * rows + size) // (2 * size)
    return (place, row) if row < rows else (place + 1, 0)


def _position(layout: Layout, order: Sequence[int], parameters: Sequence[Weighed], cut: tuple[int, int]) -> int:
    """Of a cut, in the flat buffer."""
    place, row = cut
    if place == len(order):
        return layout.gradients
    index = order[place]
    return layout.offsets[index] + row * (layout.sizes[index] // parameters[index].rows)
