"""Equally many passes on all ranks, for models whose ranks exchange something in each: a rank that has no batch left
gets another's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from hpctrain.comm.group import Group
from hpctrain.train.framework import HostBatch

SHARE = "send a batch to ranks that have none"
"""What a rank waits for."""


def even_batches(batches: Iterable[HostBatch], sync_group: Group | None) -> Iterator[tuple[HostBatch, bool]]:
    """This rank's batches, each with True; then others', with False, as long as some rank has batches. Collective.

    Args:
        batches: of this rank.
        sync_group: ranks that exchange something in passes; None if each makes its own.
    """
    if sync_group is None:
        yield from ((batch, True) for batch in batches)
        return
    left = iter(batches)
    while True:
        own = next(left, None)
        have = sync_group.gather(np.array(own is not None), "see who has batches left")
        if not have.any():
            return
        lent = None if have.all() else shared_batch(own, int(have.argmax()), sync_group)
        if own is not None:
            yield own, True
        elif lent is not None:
            yield lent, False


def shared_batch(own: HostBatch | None, lender: int, group: Group) -> HostBatch:
    """The batch of one rank, on all. Collective."""
    told = {name: [list(array.shape), array.dtype.str] for name, array in (own or {}).items()}
    shapes = group.broadcast(told, SHARE, lender)
    lent = {name: np.empty(shape, kind) for name, (shape, kind) in shapes.items()}
    for name, array in lent.items():
        if group.rank == lender and own is not None:
            array[...] = own[name]
        group.broadcast_array(array, SHARE, lender)
    return lent
