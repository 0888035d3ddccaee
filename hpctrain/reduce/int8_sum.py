"""Sums with one byte per value sent: 8-bit integers in blocks with a common scale, and error feedback.

Each rank adds the rounding error of earlier messages to its values, rounds, and keeps the new error (Seide et al. 2014;
Karimireddy et al. 2019). Each rank receives its part from all ranks, adds in fp32 and in rank order, rounds again and
sends the sum, keeping that rounding error too. All ranks decode the same bytes, so their results are bitwise equal.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hpctrain.comm.group import Group
from hpctrain.reduce.candidates import Candidate
from hpctrain.reduce.flat_layout import Layout
from hpctrain.reduce.mpi_allreduce import duplicate

BLOCK = 128
"""Values per 4-byte scale: 1.031 bytes a value, 0.258 of fp32's size."""
CHUNK = 256 * BLOCK
"""Values packed at a time, few enough to stay in a core's private cache."""
LARGEST = 127
SMALLEST_SCALE = 1e-30
"""Blocks with a smaller scale are sent as zeros and go into the error: the inverse of the scale could overflow."""
WHAT = "exchange compressed gradients"

Floats = NDArray[np.float32]


@dataclass
class Residue:
    """Rounding error that compressed messages have left out so far on this rank; part of a run's state.

    Only the sum over all ranks matters: it is what the summed gradients lack. How it is distributed does not matter.
    """

    exact_updates: int
    """Number of updates at the beginning of the run whose sums are exact."""
    error: Floats
    """Error per value, laid out as the gradients in the flat buffer."""
    updates: NDArray[np.int64] = field(default_factory=lambda: np.zeros(1, np.int64))
    """Number of exchanges so far, in one element."""
    sharers: NDArray[np.int64] = field(default_factory=lambda: np.zeros(2, np.int64))
    """Number of ranks, and how many of them send each value."""
    sent: slice = field(default_factory=lambda: slice(0))
    """The part of the buffer that this rank sends."""

    def of(self, sent: slice) -> Floats:
        """Sets the part that this rank sends; returns its error."""
        self.sent = sent
        return self.error[sent]

    def begins_exactly(self) -> bool:
        """Counts an update; returns whether its sums are exact."""
        self.updates += 1
        return bool(self.updates[0] <= self.exact_updates)

    def load(self, error: Floats, updates: NDArray[np.int64], sharers: NDArray[np.int64]) -> None:
        """Restores saved state.

        Args:
            error: this rank's error; the mean over all saved ranks if their number has changed.
            updates, sharers: as saved.
        """
        self.updates[:] = updates
        if np.array_equal(sharers, self.sharers):
            self.error[:] = error
            return
        self.error[:] = 0
        if sharers[0] != self.sharers[0]:  # same number of ranks on other nodes: no rank knows the others' errors
            self.error[self.sent] = error[self.sent] * np.float32(sharers[0] / self.sharers[1])


def residue_of(candidate: Candidate, layout: Layout, exact_updates: int) -> Residue | None:
    """The residue for a candidate's gradients; None if it does not round to int8."""
    if candidate.compression != "int8":
        return None
    return Residue(exact_updates, np.zeros(layout.gradients, np.float32))


class Int8Sum:
    """Sums an array in place over the ranks of a group.

    Args:
        group: the ranks, on a communicator that nothing else uses.
        array: contiguous fp32 array.
        values: number of leading elements that are compressed; the rest are sent as they are.
        residue: error of the flat buffer that ``array`` is part of.
        begin: where the array's values begin in the flat buffer.
    """

    def __init__(self, group: Group, array: Floats, values: int, residue: Residue, begin: int = 0) -> None:
        self.group, self.array, self.residue = group, array, residue
        self.values, self.tail = array[:values], array[values:]
        self.error = residue.of(slice(begin, begin + values))
        width = -(-values // (group.size * BLOCK)) * BLOCK
        starts = [min(part * width, values) for part in range(group.size + 1)]
        self.parts = list(itertools.pairwise(starts))
        self.packed = width + 4 * (width // BLOCK)
        self.outgoing = np.zeros((group.size, self.packed + self.tail.nbytes), np.uint8)
        self.incoming = np.zeros_like(self.outgoing)
        self.result = np.zeros(self.packed, np.uint8)
        self.work = np.zeros((3, CHUNK), np.float32)
        self.bytes_sent = (group.size - 1) * (self.outgoing.shape[1] + self.packed)
        """Bytes that this rank sends in a compressed sum."""

    def run(self) -> None:
        """Replaces the array by its sum. Collective."""
        if self.residue.begins_exactly():
            self.group.add(self.array, WHAT)
            return
        with np.errstate(invalid="ignore", over="ignore"):  # non-finite values stay so, on all ranks
            self._run()

    def _run(self) -> None:
        for row, part in zip(self.outgoing, self.parts, strict=True):
            for here, there in self._chunks(part):
                self._pack(np.add(self.values[here], self.error[here], out=self.work[0][: length(here)]), row, there)
                self.error[here] = self.work[0][: length(here)]
            row[self.packed :] = self.tail.view(np.uint8)
        self.group.swap(self.outgoing, self.incoming, WHAT)
        for here, there in self._chunks(self.parts[self.group.rank]):
            total = self.work[0][: length(here)]
            total[:] = 0
            for row in self.incoming:
                total += self._unpack(row, there)[: length(here)]
            self._pack(total, self.result, there)
            self.error[here] += total
        tails = [row[self.packed :].view(np.float32) for row in self.incoming]
        for row, part in zip(self.group.gather(self.result, WHAT), self.parts, strict=True):
            for here, there in self._chunks(part):
                self.values[here] = self._unpack(row, there)[: length(here)]
        self.tail[:] = np.sum(tails, axis=0, dtype=np.float32)

    def _chunks(self, part: tuple[int, int]) -> Iterator[tuple[slice, slice]]:
        """Ranges of the values, with the range of whole blocks that each takes in a row of packed values."""
        for begin in range(*part, CHUNK):
            end, at = min(begin + CHUNK, part[1]), begin - part[0]
            yield slice(begin, end), slice(at, at + -(-(end - begin) // BLOCK) * BLOCK)

    def _fields(self, row: NDArray[np.uint8], there: slice) -> tuple[NDArray[np.int8], Floats]:
        width = self.packed * BLOCK // (BLOCK + 4)
        scales: Floats = row[width : self.packed].view(np.float32)[there.start // BLOCK : there.stop // BLOCK]
        return row[there].view(np.int8).reshape(-1, BLOCK), scales

    def _pack(self, values: Floats, row: NDArray[np.uint8], there: slice) -> None:
        """Packs the values and leaves their rounding error in work[0], of which they are the first part."""
        blocks = self.work[0][: length(there)]
        blocks[len(values) :] = 0
        quantize(blocks.reshape(-1, BLOCK), *self._fields(row, there), self.work[1][: length(there)])
        blocks -= self._unpack(row, there)

    def _unpack(self, row: NDArray[np.uint8], there: slice) -> Floats:
        integers, scales = self._fields(row, there)
        out: Floats = self.work[2][: length(there)]
        np.multiply(integers, scales[:, None], out=out.reshape(-1, BLOCK), dtype=np.float32)
        return out


def quantize(blocks: Floats, integers: NDArray[np.int8], scales: Floats, work: Floats) -> None:
    """Rounds to multiples of each block's scale, which is 1/127 of its largest magnitude; ties to even.

    Args:
        blocks: [blocks, values per block].
        integers: result, of the same shape.
        scales: resulting scale of each block.
        work: scratch space, with the same number of elements as ``blocks``.
    """
    scaled = work.reshape(blocks.shape)
    np.abs(blocks, out=scaled)
    np.divide(scaled.max(axis=1), np.float32(LARGEST), out=scales)
    inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=~(scales < SMALLEST_SCALE))
    np.multiply(blocks, inverse[:, None], out=scaled)
    integers[...] = np.rint(scaled, out=scaled)


def length(part: slice) -> int:
    """Number of elements in a slice."""
    return int(part.stop - part.start)


class Int8Allreduce:
    """Int8Sum over a flat buffer of all ranks, done entirely in ``finish``; see HostAllreduce."""

    def __init__(self, group: Group, size: int, residue: Residue) -> None:
        separate = Group(group.name, duplicate(group))
        self.buffer = np.zeros(size, np.float32)
        self.sum = Int8Sum(separate, self.buffer, len(residue.error), residue)
        residue.sharers[:] = group.size
        self.finish, self.close = self.sum.run, separate.free

    def start(self, begin: int, end: int) -> None:
        """Does nothing: the whole sum is done in ``finish``."""
