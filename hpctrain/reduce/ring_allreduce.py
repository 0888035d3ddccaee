"""Sums over ranks by a ring of small messages: what few hosts on Ethernet do best.

Each rank passes one block after the other on to its right neighbour, first adding its own values (reduce-scatter), then
the finished sums (allgather): 2 (p - 1) / p of the buffer goes through each link, the least there is (Patarasuk and
Yuan 2009). Blocks travel in pieces, and a piece is passed on as soon as it has arrived. MPI libraries choose other
algorithms for some numbers of ranks, and send large messages after a handshake that waits behind other data: over TCP
with Open MPI 5 that takes 1.5 to 3.3 times as long on two to four hosts. It goes over switches
one after the other, if Slurm tells which are above each node.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from hpctrain.comm.group import Group
from hpctrain.reduce.layout import slices
from hpctrain.reduce.mpi_allreduce import FlatAllreduce

if TYPE_CHECKING:
    from mpi4py import MPI

PIECE_BYTES = 60 * 1024
"""Just below what Open MPI sends over TCP without a handshake (btl_tcp_eager_limit: 64 KiB with its header)."""


class Ring:
    """Sums a buffer over the ranks of a communicator, in place and in the same order in every run."""

    def __init__(self, comm: MPI.Comm, buffer: NDArray[Any]) -> None:
        self.comm = comm
        self.buffer = buffer
        self.order = order = in_order(Group("ring", comm).allgather(switches(os.environ), "find the switches"))
        size, place = comm.Get_size(), order.index(comm.Get_rank())
        self.left, self.right = order[(place - 1) % size], order[(place + 1) % size]
        self.steps = 2 * (size - 1)
        parts = slices(len(buffer), size)
        length = PIECE_BYTES // buffer.itemsize
        pieces = [
            [buffer[begin : min(begin + length, part.stop)] for begin in range(part.start, part.stop, length)]
            for part in parts
        ]
        self.blocks = [pieces[(place - step) % size] for step in range(self.steps + 1)]
        """Pieces that are sent at each step: those that arrived in the one before, at first this rank's own."""
        self.arrivals = [np.empty_like(piece) for piece in max(pieces, key=len)] if size > 1 else []
        """Where pieces wait to be added."""

    def run(self) -> None:
        """Returns when the buffer holds the sums. All ranks call it."""
        sent = [[self._send(0, piece) for piece in self.blocks[0]]] if self.steps else []
        coming = [self._receive(0, index, sent) for index in range(len(self.blocks[1]))] if self.steps else []
        for step in range(self.steps):
            block, following = self.blocks[step + 1], self.blocks[step + 2 : step + 3]
            count = len(following[0]) if following else 0
            arriving, coming = coming, []
            sent.append([])
            for index, piece in enumerate(block):
                arriving[index].Wait()
                if self._adds(step):
                    piece += self.arrivals[index][: len(piece)]
                if following:
                    sent[-1].append(self._send(step + 1, piece))
                if index < count:
                    coming.append(self._receive(step + 1, index, sent))
            coming += [self._receive(step + 1, index, sent) for index in range(len(coming), count)]
        for requests in sent:
            for request in requests:
                request.Wait()

    def _adds(self, step: int) -> bool:
        return step < self.steps // 2

    def _send(self, step: int, piece: NDArray[Any]) -> MPI.Request:
        return self.comm.Isend(piece, self.right, step)

    def _receive(self, step: int, index: int, sent: list[list[MPI.Request]]) -> MPI.Request:
        """Sums overwrite a piece that this rank sent a round ago: only once that has left."""
        piece = self.blocks[step + 1][index]
        if self._adds(step):
            return self.comm.Irecv(self.arrivals[index][: len(piece)], self.left, step)
        sent[step + 1 - (self.steps // 2 + 1)][index].Wait()
        return self.comm.Irecv(piece, self.left, step)


class RingAllreduce(FlatAllreduce):
    """The same by a ring of all ranks."""

    def __init__(self, group: Group, length: int, dtype: DTypeLike = np.float32) -> None:
        super().__init__(group, length, dtype)
        self.ring = Ring(self.comm, self.buffer)

    def finish(self) -> None:
        self.ring.run()


ADDRESS, PATTERN = "SLURM_TOPOLOGY_ADDR", "SLURM_TOPOLOGY_ADDR_PATTERN"
"""Such as ``s0.s4.tux1`` and ``switch.switch.node``; set on each node if its cluster has a topology."""


def switches(environment: Mapping[str, str]) -> list[str]:
    """From the top of the network down to this node's; none if Slurm does not tell."""
    kinds = environment.get(PATTERN, "").split(".")
    names = environment.get(ADDRESS, "").split(".", len(kinds) - 1)  # the node's name comes last, and may have dots
    return [name for name, kind in zip(names, kinds, strict=False) if name and kind not in ("", "node")]


def in_order(paths: Sequence[Sequence[str]]) -> list[int]:
    """Ranks, those of each switch one after the other; as they are if they are so already, or if a path is unknown.

    Args:
        paths: switches of each rank.
    """
    if not all(paths):
        return list(range(len(paths)))
    first: dict[tuple[str, ...], int] = {}

    def place(rank: int) -> tuple[list[int], int]:
        path = paths[rank]
        return [first[tuple(path[: depth + 1])] for depth in range(len(path))], rank

    for rank, path in enumerate(paths):
        for depth in range(len(path)):
            first.setdefault(tuple(path[: depth + 1]), rank)
    return sorted(range(len(paths)), key=place)
