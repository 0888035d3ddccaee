"""Sums of a flat host buffer over the ranks of a group, by MPI."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from hpctrain.comm.group import Group
from hpctrain.reduce.compression import Codec
from hpctrain.reduce.layout import slices

if TYPE_CHECKING:
    from mpi4py import MPI

LARGEST_MESSAGE = 2**28
"""Elements; MPI libraries before MPI 4 count in 32 bits, and some still do inside."""


class HostAllreduce(Protocol):
    """Sums ``buffer`` over the ranks, in place. Every rank makes the same calls in the same order."""

    buffer: NDArray[Any]
    """This rank's values before, the sums after ``finish``; one-dimensional."""

    def start(self, begin: int, end: int) -> None:
        """These elements are complete and may travel; the calls before ``finish`` cover the buffer in order."""

    def finish(self) -> None:
        """Returns when the whole buffer holds the sums."""

    def close(self) -> None:
        """Releases communicators."""


class FlatAllreduce:
    """One Allreduce after everything is ready."""

    def __init__(self, group: Group, length: int, dtype: DTypeLike = np.float32) -> None:
        self.comm = duplicate(group)
        self.buffer = np.zeros(length, dtype)

    def start(self, begin: int, end: int) -> None:
        """Waits for finish."""

    def finish(self) -> None:
        from mpi4py import MPI

        for begin in range(0, len(self.buffer), LARGEST_MESSAGE):
            self.comm.Allreduce(MPI.IN_PLACE, self.buffer[begin : begin + LARGEST_MESSAGE])

    def close(self) -> None:
        self.comm.Free()


class OverlappedAllreduce:
    """A nonblocking Allreduce for each part as soon as it is ready; each call also moves the earlier ones on."""

    def __init__(self, group: Group, length: int, dtype: DTypeLike = np.float32) -> None:
        self.comm = duplicate(group)
        self.buffer = np.zeros(length, dtype)
        self.requests: list[MPI.Request] = []

    def start(self, begin: int, end: int) -> None:
        from mpi4py import MPI

        MPI.Request.Testall(self.requests)
        self.requests.append(self.comm.Iallreduce(MPI.IN_PLACE, self.buffer[begin:end]))

    def finish(self) -> None:
        from mpi4py import MPI

        MPI.Request.Waitall(self.requests)
        self.requests.clear()

    def close(self) -> None:
        self.comm.Free()


class CompressedAllreduce:
    """16 bits a value on the wire, fp32 sums: each rank gets its slice of all ranks, adds in rank order, rounds, sends.

    The last ``extra`` elements travel as they are: losses and weights keep fp32's precision. All ranks decode the same
    words, so they hold the same bits.
    """

    def __init__(self, group: Group, length: int, extra: int, codec: Codec) -> None:
        self.comm = duplicate(group)
        self.codec = codec
        self.buffer = np.zeros(length, np.float32)
        self.values = self.buffer[: length - extra]
        self.tail = self.buffer[length - extra :]
        self.slices = slices(len(self.values), group.size)
        width = self.slices[0].stop
        self.mine = self.slices[group.rank]
        self.outgoing = np.zeros((group.size, width + 2 * extra), np.uint16)
        self.incoming = np.zeros_like(self.outgoing)
        self.result = np.zeros(width, np.uint16)
        self.results = np.zeros((group.size, width), np.uint16)
        self.width = width

    def start(self, begin: int, end: int) -> None:
        """Waits for finish."""

    def finish(self) -> None:
        for row, part in zip(self.outgoing, self.slices, strict=True):
            self.codec.encode(self.values[part], row[: part.stop - part.start])
            row[self.width :] = self.tail.view(np.uint16)
        self.comm.Alltoall(self.outgoing, self.incoming)
        count = self.mine.stop - self.mine.start
        total = np.zeros(count, np.float32)
        term = np.empty(count, np.float32)
        self.tail[...] = 0
        for row in self.incoming:
            self.codec.decode(row[:count], term)
            total += term
            self.tail += row[self.width :].view(np.float32)
        self.codec.encode(total, self.result[:count])
        self.comm.Allgather(self.result, self.results)
        for row, part in zip(self.results, self.slices, strict=True):
            self.codec.decode(row[: part.stop - part.start], self.values[part])

    def close(self) -> None:
        self.comm.Free()


def duplicate(group: Group) -> MPI.Comm:
    """A communicator of its own: nothing that others send can be mistaken for a gradient."""
    if group.comm is None:
        raise ValueError("a group of one has nothing to sum")
    return group.comm.Dup()
