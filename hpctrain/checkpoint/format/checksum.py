"""CRC-32 of the parts of a file, from sums of blocks that do not begin where the parts do.

A CRC is the remainder of a polynomial over GF(2). Appending n bytes multiplies it by x ** (8 * n); so the sum of a
whole is that of its parts, each multiplied by the factor of what follows it, added up (which is exclusive or).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

try:  # several times as fast as zlib, whose sums are the same
    from isal.isal_zlib import crc32 as crc32
except ImportError:
    from zlib import crc32 as crc32

Polynomials = NDArray[np.uint32]
"""Remainders modulo the CRC's polynomial; bit 31 is the coefficient of x**0, as in zlib's sums."""

POLYNOMIAL = np.uint32(0xEDB88320)
"""CRC-32 of zlib, PNG and Ethernet."""
ONE = np.uint32(1 << 31)


class Checksums:
    """CRC-32 of parts of a buffer, from blocks that are summed up in any order, by any thread.

    Args:
        buffer: bytes, 1-dimensional, contiguous.
        extents: (offset, length) of the parts, ascending, without overlap, none of them empty.
        block_bytes: size of a block.
    """

    def __init__(self, buffer: NDArray[np.uint8], extents: Sequence[tuple[int, int]], block_bytes: int) -> None:
        parts = np.array(extents, dtype=np.int64).reshape(-1, 2)
        blocks = np.arange(0, buffer.size + block_bytes, block_bytes).clip(max=buffer.size)
        cuts = np.unique(np.concatenate([blocks, parts[:, 0], parts.sum(axis=1)]))
        self.view = buffer.data
        self.cuts = cuts.tolist()
        self.sums = [0] * (len(self.cuts) - 1)
        self.first = np.searchsorted(cuts, blocks).tolist()
        """Number of the first segment of each block, and of all segments."""
        spans = np.stack([np.searchsorted(cuts, parts[:, 0]), np.searchsorted(cuts, parts.sum(axis=1))], axis=1)
        lengths = np.diff(spans)[:, 0]
        ends = np.repeat(parts.sum(axis=1), lengths)
        self.of_parts = np.concatenate([np.arange(*span) for span in spans] or [np.arange(0)])
        """Segments that lie in a part, in order."""
        self.shift_in_part = shift(ends - cuts[self.of_parts + 1])
        self.begins = lengths.cumsum() - lengths
        """Of each part, among those segments."""

    def add(self, block: int, begin: int, end: int) -> None:
        """Sums up the block of this number, which lies between these bytes."""
        for segment in range(self.first[block], self.first[block + 1]):
            self.sums[segment] = crc32(self.view[self.cuts[segment] : self.cuts[segment + 1]])

    def result(self) -> list[int]:
        """The sums of the parts, of blocks all of which were added."""
        if not self.begins.size:
            return []
        sums = np.array(self.sums, dtype=np.uint32)[self.of_parts]
        found: list[int] = np.bitwise_xor.reduceat(multiply(sums, self.shift_in_part), self.begins).tolist()
        return found


def shift(num_bytes: NDArray[np.int64]) -> Polynomials:
    """x ** (8 * n) for each n."""
    result = np.full(num_bytes.shape, ONE)
    for level in range(-(-int(num_bytes.max(initial=0)).bit_length() // 8)):
        result = multiply(result, shifts_by_level(level)[(num_bytes >> (8 * level)) & 0xFF])
    return result


@cache
def shifts_by_level(level: int) -> Polynomials:
    """x ** (8 * n * 256**level) for n from 0 to 255."""
    if level == 0:
        unit = np.array([ONE >> np.uint32(8)])
    else:
        below = shifts_by_level(level - 1)
        unit = multiply(below[255:], below[1:2])
    powers = np.array([ONE])
    while powers.size < 256:
        powers = np.concatenate([powers, multiply(powers, unit)])
        unit = multiply(unit, unit)
    return powers


def multiply(first: Polynomials, second: Polynomials) -> Polynomials:
    """Elementwise products."""
    product = np.zeros(np.broadcast_shapes(first.shape, second.shape), dtype=np.uint32)
    for power in range(32):  # second is now times x ** power
        product ^= second & mask(first >> np.uint32(31 - power))
        second = (second >> np.uint32(1)) ^ (POLYNOMIAL & mask(second))
    return product


def mask(values: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """All bits where a value's lowest bit is set, else none; several times as fast as a choice."""
    spread: NDArray[np.uint32] = np.negative(values & np.uint32(1))
    return spread
