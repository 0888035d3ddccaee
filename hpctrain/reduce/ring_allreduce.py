"""Sums over ranks by a ring of small messages, the best method for a few hosts on Ethernet.

Each rank passes blocks to its right neighbour, first adding its own values (reduce-scatter), then the finished sums
(allgather): 2 (p - 1) / p of the buffer crosses each link, the minimum (Patarasuk and Yuan 2009). Blocks are sent in
pieces, and each piece is passed to the next rank as soon as it has arrived. MPI libraries choose other algorithms for
some numbers of ranks, and send large messages after a handshake that queues behind other data: over TCP with Open MPI 5
that takes 1.5 to 3.3 times as long on two to four hosts. If Slurm reports the switches above each node, the ring visits
one switch after the other.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from hpctrain.comm.group import Group
from hpctrain.reduce.flat_layout import slices
from hpctrain.reduce.mpi_allreduce import FlatAllreduce

if TYPE_CHECKING:
    from mpi4py import MPI

PIECE_BYTES = 60 * 1024
"""Just below Open MPI's largest message without a handshake over TCP (btl_tcp_eager_limit: 64 KiB with header)."""


class Ring:
    """Sums a buffer over the ranks of a communicator, in place and always in the same order."""

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
        """Pieces sent at each step: at first this rank's own, then those that arrived in the previous step."""
        self.arrivals = [np.empty_like(piece) for piece in max(pieces, key=len)] if size > 1 else []
        """Receive buffers for pieces that are still to be added."""

    def run(self) -> None:
        """Replaces the buffer by its sum. Collective."""
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
        """Posts a receive. A finished sum overwrites a piece that was sent one round ago, so that send must be done."""
        piece = self.blocks[step + 1][index]
        if self._adds(step):
            return self.comm.Irecv(self.arrivals[index][: len(piece)], self.left, step)
        sent[step + 1 - (self.steps // 2 + 1)][index].Wait()
        return self.comm.Irecv(piece, self.left, step)


class RingAllreduce(FlatAllreduce):
    """Sums a flat buffer by a ring of all ranks; see HostAllreduce."""

    def __init__(self, group: Group, length: int, dtype: DTypeLike = np.float32) -> None:
        super().__init__(group, length, dtype)
        self.ring = Ring(self.comm, self.buffer)

    def finish(self) -> None:
        self.ring.run()


ADDRESS, PATTERN = "SLURM_TOPOLOGY_ADDR", "SLURM_TOPOLOGY_ADDR_PATTERN"
"""Set by Slurm on clusters with a topology, to values such as ``s0.s4.tux1`` and ``switch.switch.node``."""


def switches(environment: Mapping[str, str]) -> list[str]:
    """Switches from the top of the network down to this node's; empty if Slurm does not report them."""
    kinds = environment.get(PATTERN, "").split(".")
    names = environment.get(ADDRESS, "").split(".", len(kinds) - 1)  # the node's name comes last, and may have dots
    return [name for name, kind in zip(names, kinds, strict=False) if name and kind not in ("", "node")]


def in_order(paths: Sequence[Sequence[str]]) -> list[int]:
    """Ranks ordered so that those below each switch are adjacent; unchanged if they already are or a path is unknown.

    Args:
        paths: the switches above each rank.
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
