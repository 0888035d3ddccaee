"""Which writer writes which rows of the state that is equal on all ranks, and in which pieces."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from hpctrain.checkpoint.format.boxes import Box
from hpctrain.checkpoint.format.layout import TensorPiece, TensorSpec, rows_of

SPLIT_BYTES = 1 << 20
"""Tensors from this size are split by rows; smaller ones go to one writer."""
MOST_TILES = 8
"""Of a tensor: whatever 2, 4 or 8 ranks cut it into is then read alone."""
LEAST_TILE_BYTES = 1 << 15
"""A hundred times what the index says of a tile, which every reader reads."""
MOST_CRUMBS = 8
"""Of so small a tile: if very many writers had a part of each, the index would outgrow the tensor."""


def partition(tensors: Sequence[TensorSpec], num_writers: int) -> list[list[TensorPiece]]:
    """Splits the tensors' bytes evenly, in order: writer w gets the w-th run of pieces.

    Every rank computes the same result from the same tensors, so nothing has to be agreed on. A part differs from the
    mean by at most SPLIT_BYTES or one row at each end.
    """
    ends = list(accumulate(tensor.num_bytes for tensor in tensors))
    total = ends[-1] if ends else 0
    cuts = [(0, 0)]
    cuts += [cut(tensors, ends, total * writer // num_writers) for writer in range(1, num_writers)]
    cuts.append((len(tensors), 0))
    return [pieces_between(tensors, first, last) for first, last in pairwise(cuts)]


def cut(tensors: Sequence[TensorSpec], ends: Sequence[int], target: int) -> tuple[int, int]:
    """(tensor, row) before which to cut, next to a position in the tensors' bytes."""
    index = bisect_right(ends, target)
    if index == len(tensors):
        return index, 0
    tensor = tensors[index]
    into = target - (ends[index] - tensor.num_bytes)
    if tensor.num_bytes >= SPLIT_BYTES:
        row = (into + tensor.row_bytes // 2) // tensor.row_bytes
        return (index, row) if row < tensor.rows else (index + 1, 0)
    return (index, 0) if 2 * into < tensor.num_bytes else (index + 1, 0)


def pieces_between(tensors: Sequence[TensorSpec], first: tuple[int, int], last: tuple[int, int]) -> list[TensorPiece]:
    """The pieces from one cut to the next."""
    pieces = []
    for index in range(first[0], min(last[0] + 1, len(tensors))):
        begin = first[1] if index == first[0] else 0
        end = last[1] if index == last[0] else tensors[index].rows
        empty = tensors[index].rows == 0 and index < last[0]
        if end > begin or empty:
            pieces.append(rows_of(tensors[index], begin, end - begin))
    return pieces


def tiles(piece: TensorPiece, axis: int, parts: int) -> list[TensorPiece]:
    """The same elements in pieces that begin at the same places of the tensor, whatever a rank has of it.

    Args:
        piece: any.
        axis: along which layers of this kind are cut over ranks.
        parts: into this many equal ones, each of which is cut by itself.
    """
    shape = piece.tensor.shape
    count = math.gcd(MOST_TILES * parts, *shape[axis : axis + 1])
    least = LEAST_TILE_BYTES // MOST_CRUMBS if axis else 0  # every writer's rows have some of all columns
    while count > 1 and (piece.tensor.num_bytes < count * LEAST_TILE_BYTES or piece.num_bytes < count * least):
        count //= 2
    if axis >= len(shape) or count == 1:
        return [piece]
    width = shape[axis] // count
    first, last = piece.box.begin[axis] // width, -(-piece.box.end[axis] // width)
    size = (*shape[:axis], width, *shape[axis + 1 :])
    begins = (tuple(at * width * (each == axis) for each in range(len(shape))) for at in range(first, last))
    return [replace(piece, box=piece.box.overlap(Box(begin, size))) for begin in begins]
