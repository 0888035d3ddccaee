"""Sums of several arrays over ranks through the memory they share, from where the arrays lie.

As in shm_allreduce.py each rank adds up one slice of all arrays. Here a rank leaves in shared memory only what the
others need of its arrays, reads its own slice where it lies, and writes each sum once, to one place where all ranks
read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from hpctrain.comm.group import Group
from hpctrain.reduce.layout import SQUARE, Layout, slices
from hpctrain.reduce.shm_allreduce import ADD, ARRIVE, SharedArrays, add_pairwise, between_nodes, chunks, share_arrays


@dataclass(frozen=True)
class Copy:
    """What of a piece the other ranks need."""

    piece: int
    part: slice
    """Of the piece, flat."""
    to: NDArray[Any]
    """In shared memory."""


@dataclass(frozen=True)
class Sum:
    """What of a piece this rank adds up."""

    piece: int
    part: slice
    """Of the piece, flat."""
    boxes: list[NDArray[Any]]
    """The same part of what each rank of the node has left; this rank's own is where it was computed."""
    to: NDArray[Any]
    """Where all ranks of the node read the sum."""


class ShmPieces:
    """Sums pieces over the ranks of a group; see PieceAllreduce and ``open_shm_pieces``."""

    def __init__(
        self, shared: SharedArrays, layout: Layout, shapes: Sequence[tuple[int, ...]], ring: bool = False
    ) -> None:
        """
        Args:
            shared: an array for each rank of the node and one for the sums, each longer by one than the layout.
            layout, shapes: of the pieces except the slots, which are the last one.
            ring: whether nodes add up by hpctrain's ring.
        """
        self.node, self.close = shared.node, shared.free
        *boxes, total = shared.arrays
        self.dtype = total.dtype
        spans = [slice(begin, begin + size) for begin, size in zip(layout.offsets, layout.sizes, strict=True)]
        spans.append(slice(layout.gradients, layout.length))
        own = self.node.rank
        mine = slices(layout.length, len(boxes))[own]
        self.copies = [
            Copy(piece, slice(begin - span.start, end - span.start), boxes[own][begin:end])
            for piece, span in enumerate(spans)
            for begin, end in ((span.start, min(span.stop, mine.start)), (max(span.start, mine.stop), span.stop))
            if begin < end
        ]
        self.sums = [
            Sum(piece, slice(begin - span.start, end - span.start), [box[begin:end] for box in boxes], total[begin:end])
            for piece, span in enumerate(spans)
            for begin, end in chunks(max(span.start, mine.start), min(span.stop, mine.stop))
        ]
        self.between = between_nodes(shared.peers, total[mine], ring) if shared.peers else None
        self.squares = [box[-1:] for box in boxes]
        """Of each rank's slice; behind the pieces."""
        self.views = [total[span].reshape(shape) for span, shape in zip(spans, shapes, strict=False)]
        self.slots = total[spans[-1]]

    def sum(self, *pieces: NDArray[Any]) -> list[NDArray[Any]]:
        flat = [piece.reshape(-1) for piece in pieces]
        for copy in self.copies:
            np.copyto(copy.to, flat[copy.piece][copy.part])
        self.node.meet(ARRIVE)  # all have left what others need, and none reads the sums of the call before any more
        squared = 0.0
        for part in self.sums:
            terms = part.boxes.copy()
            terms[self.node.rank] = flat[part.piece][part.part]
            add_pairwise(terms, part.to, kept=self.node.rank)
            squared += self._square(part)  # while they are in the core's cache
        if self.between:
            self.between()
            squared = sum(map(self._square, self.sums))
        self.squares[self.node.rank][:] = squared
        self.node.meet(ADD)
        return [*self.views, with_square(self.slots, sum(float(square[0]) for square in self.squares))]

    def _square(self, part: Sum) -> float:
        return float(np.dot(part.to, part.to)) if part.piece < len(self.views) else 0.0


def open_shm_pieces(
    group: Group, layout: Layout, shapes: Sequence[tuple[int, ...]], dtype: DTypeLike, ring: bool
) -> ShmPieces | None:
    """Shared memory for pieces; None, on all ranks, if that is impossible (as ``share_arrays``). Collective."""
    shared = share_arrays(group, layout.length + 1, dtype, common=1)
    return ShmPieces(shared, layout, shapes, ring) if shared else None


def with_square(slots: NDArray[Any], square: float) -> NDArray[Any]:
    """A copy of slots that holds the square of the norm."""
    told = slots.copy()
    told[SQUARE] = square
    return told
