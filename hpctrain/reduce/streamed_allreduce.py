"""Sums over ranks in small pieces, each of which travels as soon as it is ready: while backward computes the others.

The ranks of a node add up in the memory they share, so that a node's values cross the network once. Between nodes one
rank adds up each piece and sends the sum to the others; ranks take turns at that, so what passes each link is the least
there is. Of two ranks both add up. Who adds follows from the calls alone: results do not depend on timing. Within and
between nodes terms are added by twos, neighbours first: if nodes have 1, 2, 4, 8, ... ranks in order, that is one tree
over all ranks, and sums of fp32 are bitwise identical on any number of nodes. Pieces are so small that MPI hands them
to the network at once, which works while ranks compute.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.comm.group import Group
from hpctrain.reduce.compression import Codec
from hpctrain.reduce.layout import slices
from hpctrain.reduce.ring_allreduce import PIECE_BYTES
from hpctrain.reduce.shm_allreduce import ADD, ARRIVE, add_pairwise

if TYPE_CHECKING:
    from mpi4py import MPI

SEND = "send gradients"
"""What a rank waits for."""
AWAKE_S = 1e-3
"""After which a rank that waits for others of its node sleeps: they may need its core, and nothing is on its way."""
TERM, SUM = 0, 1
"""Tags of messages."""


class Piece:
    """Neighbouring elements that travel together.

    Args:
        group: the ranks.
        owner: the rank that adds them up; None if all do.
        place: of the elements in the arrays.
        values: these elements of this rank.
        codec: of the wire, if it is not that of the values.
    """

    def __init__(
        self, group: Group, owner: int | None, place: slice, values: NDArray[Any], codec: Codec | None
    ) -> None:
        others = [rank for rank in range(group.size) if rank != group.rank]
        self.place, self.values, self.codec = place, values, codec
        self.adds = owner in (None, group.rank)
        self.words = values if codec is None else np.empty(len(values), np.uint16)
        adders = others if owner is None else [owner] if owner != group.rank else []
        self.rows = {rank: np.empty_like(self.words) for rank in (others if self.adds else adders)}
        """What arrives, by the rank it comes from: the others' terms, or the sum."""
        self.terms_to = adders
        self.sums_to = others if owner == group.rank else []
        self.requests: list[MPI.Request] = []

    def start(self, comm: MPI.Comm | None) -> None:
        """Leaves for the ranks that add it up."""
        if comm is None:
            return
        if self.codec is not None:
            self.codec.encode(self.values, self.words)
        tag = TERM if self.adds else SUM
        self.requests = [comm.Irecv(row, rank, tag) for rank, row in self.rows.items()]
        self.requests += [comm.Isend(self.words, rank, TERM) for rank in self.terms_to]

    def finish(self, comm: MPI.Comm | None, rank: int, work: NDArray[Any]) -> list[MPI.Request]:
        """Makes the values the sum once all messages are there; returns those that then leave.

        Args:
            comm: of the group.
            rank: in it.
            work: a row for each rank that may be overwritten, if there is a codec.
        """
        if comm is None:
            return []
        if not self.adds:
            (words,) = self.rows.values()
            if self.codec is None:
                self.values[:] = words
            else:
                self.codec.decode(words, self.values)
            return []
        terms: list[NDArray[Any]] = [each for _, each in sorted({**self.rows, rank: self.words}.items())]
        if self.codec is not None:
            for number, words in enumerate(terms):
                terms[number] = work[number, : len(words)]
                self.codec.decode(words, terms[number])
        add_pairwise(terms, terms[0])
        if self.codec is not None and self.sums_to:
            self.codec.encode(terms[0], self.words)
            self.codec.decode(self.words, self.values)
        else:
            self.values[:] = terms[0]
        return [comm.Isend(self.words, other, SUM) for other in self.sums_to]


class Stream:
    """Sums an array over the ranks of a group, piece by piece.

    Args:
        group: the ranks, on a communicator that nothing else uses.
        arrays: the first holds this rank's values; all get the sums.
        codec: 16-bit form of fp32 values on the wire; None: as they are.
        exact: index of the first element that travels as it is.
    """

    def __init__(self, group: Group, arrays: Sequence[NDArray[Any]], codec: Codec | None, exact: int) -> None:
        self.group, self.arrays, self.codec, self.exact = group, arrays, codec, exact
        self.made: dict[tuple[int, int], list[Piece]] = {}
        self.number = 0
        self.started = 0
        """Calls of ``start`` since everything had arrived."""
        self.added: deque[tuple[int, Piece]] = deque()
        """Under way: pieces that this rank adds up, with the number of their call, from 1."""
        self.awaited: deque[tuple[int, Piece]] = deque()
        """The others."""
        self.leaving: list[tuple[int, MPI.Request]] = []
        """Sums that this rank sends, out of the arrays, with the number of their call."""
        self.work = np.empty((0 if codec is None else group.size, PIECE_BYTES // 2), arrays[0].dtype)

    def start(self, begin: int, end: int) -> None:
        """These elements may travel."""
        if (begin, end) not in self.made:
            self.made[begin, end] = [*self._cut(begin, min(end, self.exact)), *self._cut(max(begin, self.exact), end)]
        self.started += 1
        for piece in self.made[begin, end]:
            add_pairwise([array[piece.place] for array in self.arrays], piece.values)
            piece.start(self.group.comm)
            (self.added if piece.adds else self.awaited).append((self.started, piece))

    def advance(self, calls: float = 0) -> None:
        """Takes what has arrived; what the first ``calls`` calls of ``start`` sent is there then, and may change."""
        from mpi4py import MPI

        for pieces in (self.added, self.awaited):
            while pieces:
                number, piece = pieces[0]
                if number <= calls:
                    self.group.settle(piece.requests, SEND)
                elif not MPI.Request.Testall(piece.requests):
                    break
                pieces.popleft()
                sent = piece.finish(self.group.comm, self.group.rank, self.work)
                self.leaving += [(number, request) for request in sent]
                for copy in self.arrays[1:]:
                    copy[piece.place] = piece.values
        if calls:
            self.group.settle([request for number, request in self.leaving if number <= calls], SEND)
            self.leaving = [each for each in self.leaving if each[0] > calls]
        if calls == math.inf:
            self.started = 0

    def _cut(self, begin: int, end: int) -> list[Piece]:
        """Neighbouring pieces go to different ranks."""
        codec = self.codec if begin < self.exact else None
        length = PIECE_BYTES // (self.arrays[0].itemsize if codec is None else 2)
        pieces = []
        for at in range(begin, end, length):
            place = slice(at, min(at + length, end))
            owner = None if self.group.size == 2 else self.number % self.group.size
            self.number += 1
            pieces.append(Piece(self.group, owner, place, self.arrays[0][place], codec))
        return pieces


class StreamedAllreduce:
    """Sums a flat buffer over all ranks; see HostAllreduce.

    Args:
        group: the ranks, or those of equal place on all nodes; on a communicator that nothing else uses.
        buffers: of this rank, or of all ranks of this node, which share that memory and add up first.
        codec, exact: see Stream.
        node: the ranks of this node, if they do.
    """

    def __init__(
        self, group: Group, buffers: Sequence[NDArray[Any]], codec: Codec | None, exact: int, node: Group | None = None
    ) -> None:
        self.node = node or Group("node")
        self.buffer = buffers[self.node.rank]
        self.stream = Stream(group, buffers, codec, exact)
        self.meetings: deque[tuple[MPI.Request, int, int]] = deque()
        """Parts that this rank has, and others of the node may not have yet."""

    def start(self, begin: int, end: int) -> None:
        if self.node.comm is None:
            self.stream.start(begin, end)
        else:
            self.meetings.append((self.node.comm.Ibarrier(), begin, end))
        self._advance(0)

    def arrive(self, calls: float) -> None:
        """Returns when the elements of the first ``calls`` calls of ``start`` are sums. All ranks call it."""
        self._advance(calls)
        if self.node.comm is not None:
            self.node.settle([self.node.comm.Ibarrier()], ADD, AWAKE_S)

    def finish(self) -> None:
        self.arrive(math.inf)

    def close(self) -> None:
        self.node.free()
        self.stream.group.free()

    def _advance(self, calls: float) -> None:
        while self.meetings and (self.stream.started < calls or self.meetings[0][0].Test()):
            request, begin, end = self.meetings.popleft()
            self.node.settle([request], ARRIVE, AWAKE_S)
            mine = slices(end - begin, self.node.size)[self.node.rank]
            self.stream.start(begin + mine.start, begin + mine.stop)
            self.stream.advance()
        self.stream.advance(calls)
