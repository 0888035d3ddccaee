"""Sums of a flat host buffer over the ranks of a group, using MPI."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import DTypeLike

from hpctrain.comm.group import Group
from hpctrain.system.array_types import Array

if TYPE_CHECKING:
    from mpi4py import MPI

LARGEST_MESSAGE = 2**28
"""Limit in elements: MPI libraries before MPI 4 count in 32 bits, and some still do so internally."""


class HostAllreduce(Protocol):
    """Sums ``buffer`` over the ranks, in place. Every rank makes the same calls in the same order."""

    buffer: Array
    """One-dimensional: this rank's values, replaced by the sums in ``finish``."""

    def start(self, begin: int, end: int) -> None:
        """These elements are complete and may be sent; the calls before ``finish`` cover the buffer in order."""

    def finish(self) -> None:
        """Returns when the whole buffer holds sums."""

    def close(self) -> None:
        """Releases communicators."""


class FlatAllreduce:
    """A single MPI Allreduce, done in ``finish``."""

    def __init__(self, group: Group, length: int, dtype: DTypeLike = np.float32) -> None:
        self.comm = duplicate(group)
        self.buffer = np.zeros(length, dtype)

    def start(self, begin: int, end: int) -> None:
        """Does nothing: the whole sum is done in ``finish``."""

    def finish(self) -> None:
        add_everywhere(self.comm, self.buffer)

    def close(self) -> None:
        self.comm.Free()


def add_everywhere(comm: MPI.Comm, values: Array) -> None:
    """Replaces a one-dimensional array by its elementwise sum over the ranks."""
    from mpi4py import MPI

    for begin in range(0, len(values), LARGEST_MESSAGE):
        comm.Allreduce(MPI.IN_PLACE, values[begin : begin + LARGEST_MESSAGE])


def duplicate(group: Group) -> MPI.Comm:
    """A separate communicator, so that no other message can be mistaken for a gradient."""
    if group.comm is None:
        raise ValueError("a group of one has nothing to sum")
    return group.comm.Dup()
