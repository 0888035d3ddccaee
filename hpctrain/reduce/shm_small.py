"""Sums of few values over the ranks of a node, which meet once for each.

Slices, as in shm_allreduce.py, need two meetings: before the sums, and before they are read. Few values are read faster
than ranks meet, so each rank adds up all of them by itself; in the same order, hence with the same bits.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import DTypeLike

from hpctrain.comm.group import Group
from hpctrain.reduce.shm_allreduce import ARRIVE, SharedArrays, share_arrays, sum_pairwise

MOST_BYTES = 2**17
"""That a rank reads: from there on, half of them and a second meeting take less time."""


class SmallShmAllreduce:
    """Sums a flat buffer over the ranks of a node; see ``open_shm_small``."""

    def __init__(self, shared: SharedArrays) -> None:
        """
        Args:
            shared: an array for each rank, of twice the buffer's length: for exchanges of even and of odd number.
                No rank overwrites what another still reads: that one enters the next exchange only afterwards.
        """
        self.node, self.close = shared.node, shared.free
        length = len(shared.arrays[0]) // 2
        self.places = [[part[:length] for part in shared.arrays], [part[length:] for part in shared.arrays]]
        self.buffer = np.zeros(length, shared.arrays[0].dtype)
        """This rank's values, then the sums."""

    def start(self, begin: int, end: int) -> None:
        """Nothing travels before ``finish``."""

    def finish(self) -> None:
        """Overwrites the buffer with the sum."""
        parts = self.places[0]
        parts[self.node.rank][:] = self.buffer
        self.node.meet(ARRIVE)
        sum_pairwise(parts, self.buffer)
        self.places.reverse()


def open_shm_small(group: Group, length: int, dtype: DTypeLike) -> SmallShmAllreduce | None:
    """For ``length`` elements; None, on all ranks, if those are many or ranks are on several nodes. Collective."""
    if length * np.dtype(dtype).itemsize * group.size > MOST_BYTES:
        return None
    shared = share_arrays(group, 2 * length, dtype)
    if shared is not None and shared.peers:
        shared.free()
        return None
    return SmallShmAllreduce(shared) if shared is not None else None
