"""Sums of arrays of any size and type over the ranks of a node, which show them to each other piece by piece.

The arrays stay where they are: their values pass through a little shared memory, whose pieces stay in the cores' caches
meanwhile. For buffers that live in shared memory see ``shm_allreduce``.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hpctrain.comm.group import Group
from hpctrain.reduce.layout import slices
from hpctrain.reduce.shm_allreduce import MOST_BYTES, SharedArrays, add_pairwise, share_arrays, sum_pairwise

PIECE = 2**20
"""Bytes of each rank that are shown at a time: more leave the caches, of fewer the meetings show."""


class ShmWindow:
    """What passes through shared memory; see ``open_shm_window``."""

    def __init__(self, shared: SharedArrays) -> None:
        """
        Args:
            shared: uint8[even] for each rank: halves for pieces of even and of odd number. No rank overwrites
                what another still reads: that one enters the next exchange only afterwards.
        """
        self.node, self.close = shared.node, shared.free
        self.piece = len(shared.arrays[0]) // 2
        self.places = [[part[: self.piece] for part in shared.arrays], [part[self.piece :] for part in shared.arrays]]

    def sum(self, values: NDArray[np.number], out: NDArray[np.number], what: str) -> None:
        """Elementwise sum over the ranks, with the same bits on all. Collective.

        Args:
            values: [n], contiguous, of one length and dtype on all ranks.
            out: [n] of this dtype, contiguous, takes the sum; may be ``values``.
            what: completes "waited for the other ranks to ..." in an error.
        """
        count = self.piece // values.itemsize
        for begin in range(0, len(values), count):
            self._sum_piece(values[begin : begin + count], out[begin : begin + count], what)

    def _sum_piece(self, values: NDArray[np.number], out: NDArray[np.number], what: str) -> None:
        parts = [place[: values.nbytes].view(values.dtype) for place in self.places[0]]
        self.places.reverse()
        parts[self.node.rank][:] = values
        self.node.meet(what)
        if len(parts) == 2 or values.nbytes * len(parts) <= MOST_BYTES:
            sum_pairwise(parts, out)
            return
        own = slices(len(out), len(parts))[self.node.rank]
        add_pairwise([part[own] for part in parts], parts[0][own])
        self.node.meet(what)
        out[:] = parts[0]


def open_shm_window(group: Group) -> ShmWindow | None:
    """Of all ranks of a group; None, on all of them, if they are on several nodes or share no memory. Collective."""
    shared = share_arrays(group, 2 * PIECE, np.uint8)
    if shared is not None and shared.peers:
        shared.free()
        return None
    return ShmWindow(shared) if shared is not None else None
