"""CRC-32 of a file and of the parts of it, with each byte read once.

A CRC is the remainder of a polynomial over GF(2). Appending n bytes multiplies it by x ** (8 * n); so the sum of a
whole is that of its parts, each multiplied by what stands behind it, added up (which is exclusive or).
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Polynomials = NDArray[np.uint32]
"""Remainders modulo the CRC's polynomial; bit 31 is the coefficient of x**0, as in zlib's sums."""

POLYNOMIAL = np.uint32(0xEDB88320)
"""CRC-32 of zlib, PNG and Ethernet."""
ONE = np.uint32(1 << 31)


def checksums(buffer: NDArray[np.uint8], extents: Sequence[tuple[int, int]]) -> tuple[int, list[int]]:
    """CRC-32 of a buffer and of parts of it.

    Args:
        buffer: bytes, 1-dimensional, contiguous.
        extents: (offset, length) of the parts, ascending, without overlap.

    Returns:
        The sum of the buffer and the sums of the parts.
    """
    view = buffer.data
    cuts = [0, *(cut for offset, length in extents for cut in (offset, offset + length)), buffer.size]
    sums = [zlib.crc32(view[begin:end]) for begin, end in pairwise(cuts)]  # gaps and parts by turns
    return joined(sums, np.diff(cuts)), sums[1::2]


def joined(sums: Sequence[int], lengths: NDArray[np.int64]) -> int:
    """CRC-32 of byte strings in a row, from the sum and the length in bytes of each."""
    behind = lengths[::-1].cumsum()[::-1] - lengths
    return int(np.bitwise_xor.reduce(multiply(np.array(sums, dtype=np.uint32), shift(behind))))


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
        product ^= np.where(first & (ONE >> np.uint32(power)), second, np.uint32(0))
        second = (second >> np.uint32(1)) ^ np.where(second & np.uint32(1), POLYNOMIAL, np.uint32(0))
    return product
