"""Sums of several arrays over ranks through shared memory, without copying whole arrays into it.

As in shm_allreduce.py, each rank sums one slice of all arrays. Here a rank copies to shared memory only what other
ranks need of its arrays, reads its own slice where it is, and writes each sum once, to a place that all ranks read.
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
    """A part of a piece that other ranks need."""

    piece: int
    part: slice
    """Range in the flattened piece."""
    to: NDArray[Any]
    """Destination in shared memory."""


@dataclass(frozen=True)
class Sum:
    """A part of a piece that this rank sums."""

    piece: int
    part: slice
    """Range in the flattened piece."""
    boxes: list[NDArray[Any]]
    """This part in each rank's shared memory; this rank's own is read from the piece itself."""
    to: NDArray[Any]
    """Where all ranks of the node read the sum."""


class ShmPieces:
    """Sums pieces over the ranks of a group; see PieceAllreduce and ``open_shm_pieces``."""

    def __init__(
        self, shared: SharedArrays, layout: Layout, shapes: Sequence[tuple[int, ...]], ring: bool = False
    ) -> None:
        """
        Args:
            shared: an array per rank of the node and one for the sums, each one element longer than the layout.
            layout, shapes: of the pieces except the slots, which form the last piece.
            ring: whether to sum between nodes by hpctrain's ring.
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
        """Squared norm of each rank's slice, stored after the pieces."""
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
            squared += self._square(part)  # while it is in the core's cache
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
    """Shares memory for pieces; None, on all ranks, if that is impossible (see ``share_arrays``). Collective."""
    shared = share_arrays(group, layout.length + 1, dtype, common=1)
    return ShmPieces(shared, layout, shapes, ring) if shared else None


def with_square(slots: NDArray[Any], square: float) -> NDArray[Any]:
    """A copy of the slots with the squared norm filled in."""
    told = slots.copy()
    told[SQUARE] = square
    return told
