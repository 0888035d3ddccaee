"""Sums with one byte a value on the wire: 8-bit integers in blocks with a common scale, and error feedback.

Each rank adds what earlier messages left out of its values, rounds, and keeps what this message leaves out (Seide et
al. 2014; Karimireddy et al. 2019). Each gets its part of all ranks, adds in fp32 and in rank order, rounds again and
sends the sum, whose rounding error it keeps too. All ranks decode the same bytes, so they hold the same bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hpctrain.comm.group import Group
from hpctrain.reduce.candidates import Candidate
from hpctrain.reduce.layout import Layout
from hpctrain.reduce.mpi_allreduce import duplicate

BLOCK = 128
"""Values that share a scale of 4 bytes: 1.031 bytes a value, 0.258 of fp32's."""
CHUNK = 256 * BLOCK
"""Values that are packed at a time: they stay in a core's own cache."""
LARGEST = 127
SMALLEST_SCALE = 1e-30
"""Smaller values are left to the error: the inverse of a smaller scale may be infinite."""
WHAT = "exchange compressed gradients"

Floats = NDArray[np.float32]


@dataclass
class Residue:
    """What compressed messages have left out so far on this rank: state of a run.

    The sum over all ranks is what the summed gradients lack in all; how it is distributed over them does not matter.
    """

    exact_updates: int
    """Updates at the beginning of the run whose sums are exact."""
    error: Floats
    """Of the gradients as they lie in the flat buffer."""
    updates: NDArray[np.int64] = field(default_factory=lambda: np.zeros(1, np.int64))
    """Exchanges so far, in one element."""
    sharers: NDArray[np.int64] = field(default_factory=lambda: np.zeros(2, np.int64))
    """Ranks, and how many of them send each value."""
    sent: slice = field(default_factory=lambda: slice(0))
    """What this rank sends."""

    def of(self, sent: slice) -> Floats:
        """The error of what this rank sends."""
        self.sent = sent
        return self.error[sent]

    def begins_exactly(self) -> bool:
        """Counts an update: whether its sums are exact."""
        self.updates += 1
        return bool(self.updates[0] <= self.exact_updates)

    def load(self, error: Floats, updates: NDArray[np.int64], sharers: NDArray[np.int64]) -> None:
        """Takes over what was saved.

        Args:
            error: this rank's; the mean of all ranks' if there were more or fewer.
            updates, sharers: as they were.
        """
        self.updates[:] = updates
        if np.array_equal(sharers, self.sharers):
            self.error[:] = error
            return
        self.error[:] = 0
        if sharers[0] != self.sharers[0]:  # with as many ranks on other nodes no rank knows the errors of others
            self.error[self.sent] = error[self.sent] * np.float32(sharers[0] / self.sharers[1])


def residue_of(candidate: Candidate, layout: Layout, exact_updates: int) -> Residue | None:
    """Of gradients that a candidate sums; None if it leaves nothing out."""
    if candidate.compression != "int8":
        return None
    return Residue(exact_updates, np.zeros(layout.gradients, np.float32))


class Int8Sum:
    """Sums an array in place over the ranks of a group.

    Args:
        group: the ranks, on a communicator that nothing else uses.
        array: of fp32, contiguous.
        values: how many are compressed; the rest travel as they are.
        residue: of a flat buffer, in which the array's values begin at ``begin``.
        begin: see there.
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
        """By this rank in a compressed sum."""

    def run(self) -> None:
        """Returns when the array holds the sums. All ranks call it."""
        if self.residue.begins_exactly():
            self.group.add(self.array, WHAT)
            return
        with np.errstate(invalid="ignore", over="ignore"):  # what is not finite stays so, on all ranks
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
        """Ranges of the values, and where whole blocks of them lie in a row of packed values."""
        for begin in range(*part, CHUNK):
            end, at = min(begin + CHUNK, part[1]), begin - part[0]
            yield slice(begin, end), slice(at, at + -(-(end - begin) // BLOCK) * BLOCK)

    def _fields(self, row: NDArray[np.uint8], there: slice) -> tuple[NDArray[np.int8], Floats]:
        width = self.packed * BLOCK // (BLOCK + 4)
        scales: Floats = row[width : self.packed].view(np.float32)[there.start // BLOCK : there.stop // BLOCK]
        return row[there].view(np.int8).reshape(-1, BLOCK), scales

    def _pack(self, values: Floats, row: NDArray[np.uint8], there: slice) -> None:
        """Leaves in the values, the first of work[0], what the row lacks of them."""
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
    """Rounds to nearest, ties to even, to multiples of a scale for each block: 1/127 of its largest magnitude.

    Args:
        blocks: [blocks, values of each].
        integers: of the same shape, overwritten.
        scales: of each block, overwritten.
        work: as many elements as ``blocks``.
    """
    scaled = work.reshape(blocks.shape)
    np.abs(blocks, out=scaled)
    np.divide(scaled.max(axis=1), np.float32(LARGEST), out=scales)
    inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=~(scales < SMALLEST_SCALE))
    np.multiply(blocks, inverse[:, None], out=scaled)
    integers[...] = np.rint(scaled, out=scaled)


def length(part: slice) -> int:
    """Elements of a range."""
    return int(part.stop - part.start)


class Int8Allreduce:
    """The same for a flat buffer of all ranks, after everything is ready; see HostAllreduce."""

    def __init__(self, group: Group, size: int, residue: Residue) -> None:
        separate = Group(group.name, duplicate(group))
        self.buffer = np.zeros(size, np.float32)
        self.sum = Int8Sum(separate, self.buffer, len(residue.error), residue)
        residue.sharers[:] = group.size
        self.finish, self.close = self.sum.run, separate.free

    def start(self, begin: int, end: int) -> None:
        """Waits for finish."""
