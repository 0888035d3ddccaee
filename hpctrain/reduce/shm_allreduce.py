"""Sums over ranks through the memory they share.

The ranks of a node keep their buffers in one shared file in memory. Once all have arrived, each adds up its own slice
of all buffers, always in the same order, and writes the sum back to all of them: reduce-scatter and allgather at
the speed of memory, with the same bits on every rank and in every run. Across nodes, ranks of equal local index add up
their slices in between: by MPI's Allreduce or by a ring of our own.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from hpctrain.comm.group import Group
from hpctrain.reduce.layout import slices
from hpctrain.reduce.mpi_allreduce import LARGEST_MESSAGE
from hpctrain.reduce.ring_allreduce import Ring

if TYPE_CHECKING:
    from mpi4py import MPI

FOLDER = "/dev/shm"
CHUNK = 32768
"""Elements that are summed and written back at a time: small enough to stay in a core's own cache in between."""


class NodeSum:
    """Sums a flat buffer over the ranks of a group; see ``open_node_sum``."""

    def __init__(
        self,
        node: MPI.Comm,
        peers: MPI.Comm | None,
        memory: mmap.mmap,
        parts: Sequence[NDArray[Any]],
        mine: int,
        ring: bool = False,
    ) -> None:
        self.node = node
        self.peers = peers
        self.memory = memory
        self.parts = parts
        self.slice = slices(len(parts[0]), len(parts))[mine]
        self.buffer = parts[mine]
        """This rank's values, then the sums; in shared memory."""
        self.ring = Ring(peers, parts[0][self.slice]) if peers and ring else None

    def start(self, begin: int, end: int) -> None:
        """Nothing travels before ``finish``: while others compute, a copy would only slow them."""

    def finish(self) -> None:
        """Overwrites the buffers of all ranks with their sum."""
        meet(self.node)
        if self.peers:
            self._sum_slice(write_back=False)
            self._sum_between_nodes()
            for part in self.parts[1:]:
                part[self.slice] = self.parts[0][self.slice]
        else:
            self._sum_slice(write_back=True)
        meet(self.node)

    def _sum_between_nodes(self) -> None:
        if self.ring:
            self.ring.run()
        elif self.peers:
            from mpi4py import MPI

            values = self.parts[0][self.slice]
            for begin in range(0, len(values), LARGEST_MESSAGE):
                self.peers.Allreduce(MPI.IN_PLACE, values[begin : begin + LARGEST_MESSAGE])

    def _sum_slice(self, write_back: bool) -> None:
        for begin in range(self.slice.start, self.slice.stop, CHUNK):
            chunk = slice(begin, min(begin + CHUNK, self.slice.stop))
            add_pairwise([part[chunk] for part in self.parts])
            if write_back:
                for part in self.parts[1:]:
                    part[chunk] = self.parts[0][chunk]

    def close(self) -> None:
        """Frees the communicators; the memory goes with its last view."""
        self.node.Free()
        if self.peers:
            self.peers.Free()


def meet(comm: MPI.Comm) -> None:
    """A barrier that leaves its core to whoever can use it: loaders and writers, or a rank that has not arrived yet."""
    request = comm.Ibarrier()
    while not request.Test():
        os.sched_yield()


def add_pairwise(terms: Sequence[NDArray[Any]]) -> None:
    """Leaves the sum in the first term and overwrites others; rounding grows with the logarithm of their number."""
    stride = 1
    while stride < len(terms):
        for index in range(0, len(terms) - stride, 2 * stride):
            np.add(terms[index], terms[index + stride], out=terms[index])
        stride *= 2


def open_node_sum(group: Group, length: int, dtype: DTypeLike = np.float32, ring: bool = False) -> NodeSum | None:
    """Shared buffers of ``length`` elements for each rank of a group; None, on all alike, where that cannot be.

    It cannot where no two ranks share a node, where nodes hold different numbers of ranks, or where shared memory is
    too small or separate (containers).
    """
    if group.comm is None:
        return None
    from mpi4py import MPI

    node = group.comm.Split_type(MPI.COMM_TYPE_SHARED, key=group.rank)
    size, rank = node.Get_size(), node.Get_rank()
    local_sizes = set(group.allgather(size, "compare the numbers of ranks on the nodes"))
    if local_sizes == {1} or len(local_sizes) > 1:
        node.Free()
        return None
    bytes_each = -(-length * np.dtype(dtype).itemsize // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = _share(Group("node", node), bytes_each, rank)
    if not all(group.allgather(memory is not None, "share memory")) or memory is None:
        node.Free()
        return None
    parts = [np.frombuffer(memory, dtype, length, offset=part * bytes_each) for part in range(size)]
    peers = group.comm.Split(color=rank, key=group.rank) if group.size > size else None
    return NodeSum(node, peers, memory, parts, rank, ring)


def _share(node: Group, bytes_each: int, rank: int) -> mmap.mmap | None:
    """Memory that all ranks of a node map. Each allocates its own part: it lies near its core, and lack of space shows.

    A file of our own rather than an MPI window: every MPI can do it, and a full /dev/shm is an error here instead of a
    bus error later.
    """
    path = f"{FOLDER}/hpctrain-{secrets.token_hex(8)}"
    handle = _allocate(path, os.O_CREAT | os.O_EXCL, 0, bytes_each) if rank == 0 else None
    path = node.broadcast(path if handle is not None else None, "name the shared memory")
    if path is not None and rank > 0:
        handle = _allocate(path, 0, rank * bytes_each, bytes_each)
    complete = all(node.allgather(handle is not None, "allocate shared memory"))
    if path is not None and rank == 0:
        os.unlink(path)  # the mappings keep it alive; nothing is left behind, however the ranks end
    if handle is None:
        return None
    try:
        return mmap.mmap(handle, node.size * bytes_each) if complete else None
    finally:
        os.close(handle)


def _allocate(path: str, flags: int, offset: int, length: int) -> int | None:
    """An open file with this range allocated, or None where that is not possible."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | flags, 0o600)
    except OSError:
        return None
    try:
        os.posix_fallocate(handle, offset, length)
    except OSError:
        os.close(handle)
        if offset == 0:
            os.unlink(path)
        return None
    return handle
