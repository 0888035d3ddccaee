"""The way in which MPI sums a host buffer, by the name of a candidate."""

from __future__ import annotations

from collections.abc import Mapping

from numpy.typing import DTypeLike

from hpctrain.comm.group import Group
from hpctrain.reduce.choice import Candidate
from hpctrain.reduce.compression import Codec
from hpctrain.reduce.exchange_slots import SLOTS
from hpctrain.reduce.mpi_allreduce import CompressedSum, FlatSum, HostSum, OverlappedSum
from hpctrain.reduce.ring_allreduce import RingSum
from hpctrain.reduce.shm_allreduce import open_node_sum


def open_mpi_sum(
    candidate: Candidate, group: Group, length: int, dtype: DTypeLike, codecs: Mapping[str, Codec]
) -> tuple[Candidate, HostSum]:
    """The sum that a candidate of kind mpi names, and what it is: where ranks cannot share memory, one flat message.

    Collective over the group.

    Args:
        candidate: what was chosen.
        group: the ranks.
        length: elements of the buffer, the slots of totals.py at its end.
        dtype: of the buffer.
        codecs: 16-bit forms by the name of a compression.
    """
    if candidate.compression != "none":
        return candidate, CompressedSum(group, length, SLOTS, codecs[candidate.compression])
    if candidate.way == "overlap":
        return candidate, OverlappedSum(group, length, dtype)
    ring = candidate.way == "ring"
    shared = open_node_sum(group, length, dtype, ring) if ring or candidate.way == "node" else None
    if shared or ring:
        return candidate, shared or RingSum(group, length, dtype)
    return Candidate("mpi", "flat"), FlatSum(group, length, dtype)
