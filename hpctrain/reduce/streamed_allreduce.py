"""Sums over ranks in small pieces, each sent as soon as it is ready, while backward computes the rest.

The ranks of a node first sum in shared memory, so that a node's values cross the network once. Between nodes, one rank
sums each piece and sends the result to the others; ranks take turns, which minimises the traffic per link. Two ranks
both sum. Which rank sums follows from the calls alone, so results do not depend on timing. Within and between nodes,
terms are added pairwise, neighbours first: if nodes have 1, 2, 4, 8, ... ranks in order, that is one tree over all
ranks, and fp32 sums are bitwise identical on any number of nodes. Pieces are small enough for MPI to pass them to the
network at once, so that they are sent while ranks compute.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from hpctrain.comm.group import Group
from hpctrain.reduce.flat_layout import slices
from hpctrain.reduce.shm_allreduce import ADD, ARRIVE, add_pairwise
from hpctrain.system.array_types import Array

if TYPE_CHECKING:
    from mpi4py import MPI

PIECE_BYTES = 60 * 1024
"""Just below Open MPI's largest message without a handshake over TCP (btl_tcp_eager_limit: 64 KiB with header)."""
SEND = "send gradients"
"""Completes "waited for the other ranks to ..." in errors."""
AWAKE_S = 1e-3
"""A rank that waits for others of its node sleeps after this time: they may need its core, and no message is due."""
TERM, SUM = 0, 1
"""Tags of messages."""


class Codec(Protocol):
    """Packs fp32 into 16 bits and back, by a framework's casts; only to send values, since sums are formed in fp32."""

    def encode(self, values: NDArray[np.float32], out: NDArray[np.uint16]) -> None:
        """Rounds to nearest, ties to even; values too large become infinite."""

    def decode(self, packed: NDArray[np.uint16], out: NDArray[np.float32]) -> None:
        """Unpacks exactly."""


class SumPiece:
    """Adjacent elements that are sent together.

    Args:
        group: the ranks.
        owner: the rank that sums them; None if all do.
        place: range of the elements in the arrays.
        values: this rank's values of these elements.
        codec: encoding for sending; None to send values as they are.
    """

    def __init__(self, group: Group, owner: int | None, place: slice, values: Array, codec: Codec | None) -> None:
        others = [rank for rank in range(group.size) if rank != group.rank]
        adders = others if owner is None else [rank for rank in others if rank == owner]
        self.place, self.values, self.codec = place, values, codec
        self.adds = owner in (None, group.rank)
        self.words = values if codec is None else np.empty(len(values), np.uint16)
        self.rows = {rank: np.empty_like(self.words) for rank in (others if self.adds else adders)}
        """Received messages by source rank: the others' terms, or the sum."""
        self.terms_to = adders
        self.sums_to = others if owner == group.rank else []
        self.requests: list[MPI.Request] = []

    def start(self, comm: MPI.Comm | None) -> None:
        """Sends the values to the ranks that sum them, and posts receives."""
        if comm is None:
            return
        if self.codec is not None:
            self.codec.encode(self.values, self.words)
        tag = TERM if self.adds else SUM
        self.requests = [comm.Irecv(row, rank, tag) for rank, row in self.rows.items()]
        self.requests += [comm.Isend(self.words, rank, TERM) for rank in self.terms_to]

    def finish(self, comm: MPI.Comm | None, rank: int, work: Array) -> list[MPI.Request]:
        """Replaces the values by the sum once all messages have arrived; returns the requests of messages then sent.

        Args:
            comm: communicator of the group.
            rank: this rank in it.
            work: a scratch row for each rank, if there is a codec.
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
        terms: list[Array] = [each for _, each in sorted({**self.rows, rank: self.words}.items())]
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


@dataclass(eq=False)
class SumStream:
    """Sums an array over the ranks of a group, piece by piece."""

    group: Group
    """The ranks, on a communicator that nothing else uses."""
    arrays: Sequence[Array]
    """The first holds this rank's values; all receive the sums."""
    codec: Codec | None
    """16-bit encoding of fp32 values for sending; None to send them as they are."""
    exact: int
    """Index of the first element that is sent unencoded."""
    made: dict[tuple[int, int], list[SumPiece]] = field(default_factory=dict)
    number: int = 0
    started: int = 0
    """Calls of ``start`` since the last time everything had arrived."""
    added: deque[tuple[int, SumPiece]] = field(default_factory=deque)
    """Pending pieces that this rank sums, with the number of their call, from 1."""
    awaited: deque[tuple[int, SumPiece]] = field(default_factory=deque)
    """Other pending pieces."""
    leaving: list[tuple[int, MPI.Request]] = field(default_factory=list)
    """Pending sends of sums, which read from the arrays, with the number of their call."""

    def __post_init__(self) -> None:
        self.work = np.empty((0 if self.codec is None else self.group.size, PIECE_BYTES // 2), self.arrays[0].dtype)

    def start(self, begin: int, end: int) -> None:
        """Starts sending these elements, which are complete."""
        if (begin, end) not in self.made:
            self.made[begin, end] = [*self._cut(begin, min(end, self.exact)), *self._cut(max(begin, self.exact), end)]
        self.started += 1
        for piece in self.made[begin, end]:
            add_pairwise([array[piece.place] for array in self.arrays], piece.values)
            piece.start(self.group.comm)
            (self.added if piece.adds else self.awaited).append((self.started, piece))

    def advance(self, calls: float = 0) -> None:
        """Processes what has arrived; waits for everything of the first ``calls`` calls of ``start``."""
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

    def _cut(self, begin: int, end: int) -> list[SumPiece]:
        """Cuts a range into pieces; adjacent pieces have different owners."""
        codec = self.codec if begin < self.exact else None
        length = PIECE_BYTES // (self.arrays[0].itemsize if codec is None else 2)
        pieces = []
        for at in range(begin, end, length):
            place = slice(at, min(at + length, end))
            owner = None if self.group.size == 2 else self.number % self.group.size
            self.number += 1
            pieces.append(SumPiece(self.group, owner, place, self.arrays[0][place], codec))
        return pieces


class StreamedAllreduce:
    """Sums a flat buffer over all ranks; see HostAllreduce.

    Args:
        group: all ranks, or those of equal local index on all nodes; on a communicator that nothing else uses.
        buffers: this rank's buffer, or those of all ranks of this node in shared memory, which are summed first.
        codec, exact: see Stream.
        node: the ranks of this node, if they share memory.
    """

    def __init__(
        self, group: Group, buffers: Sequence[Array], codec: Codec | None, exact: int, node: Group | None = None
    ) -> None:
        self.node = node or Group("node")
        self.buffer = buffers[self.node.rank]
        self.stream = SumStream(group, buffers, codec, exact)
        self.meetings: deque[tuple[MPI.Request, int, int]] = deque()
        """Parts that are ready on this rank, but perhaps not yet on the node's other ranks."""

    def start(self, begin: int, end: int) -> None:
        if self.node.comm is None:
            self.stream.start(begin, end)
        else:
            self.meetings.append((self.node.comm.Ibarrier(), begin, end))
        self._advance(0)

    def arrive(self, calls: float) -> None:
        """Returns when the elements of the first ``calls`` calls of ``start`` hold sums. Collective."""
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
