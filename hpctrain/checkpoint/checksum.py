"""CRC-32 of a file and of the parts of it, each byte read once where parts are large."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

POLYNOMIAL = 0xEDB88320
"""CRC-32 of zlib, PNG and Ethernet; bit 31 is the coefficient of x**0."""
ONE = 1 << 31
SMALL_BYTES = 256 * 1024
"""Parts below this are summed twice: cheaper than combining their sums."""
RUN_BYTES = 1 << 20
"""Small parts in a row are summed again after so many bytes, while they are in the cache."""


def multiply(first: int, second: int) -> int:
    """Product of two polynomials over GF(2), modulo the CRC's."""
    product = 0
    while first:
        if first & ONE:
            product ^= second
        first = (first << 1) & 0xFFFFFFFF
        second = (second >> 1) ^ (POLYNOMIAL if second & 1 else 0)
    return product


@lru_cache(maxsize=4096)
def shift(num_bytes: int) -> int:
    """x ** (8 * num_bytes), modulo the CRC's polynomial, by repeated squaring."""
    power, square = ONE, ONE >> 8
    while num_bytes:
        if num_bytes & 1:
            power = multiply(power, square)
        square = multiply(square, square)
        num_bytes >>= 1
    return power


def combine(first: int, second: int, second_bytes: int) -> int:
    """CRC-32 of two byte strings in a row, from the sum of each and the length of the second."""
    return multiply(shift(second_bytes), first) ^ second


def checksums(buffer: NDArray[np.uint8], extents: Sequence[tuple[int, int]]) -> tuple[int, list[int]]:
    """CRC-32 of a buffer and of parts of it.

    Args:
        buffer: bytes, 1-dimensional, contiguous.
        extents: (offset, length) of the parts, ascending, without overlap.

    Returns:
        The sum of the buffer and the sums of the parts.
    """
    view = buffer.data
    whole = 0
    summed = 0  # bytes that `whole` covers
    sums = []
    for offset, length in extents:
        end = offset + length
        crc = zlib.crc32(view[offset:end])
        sums.append(crc)
        if length >= SMALL_BYTES:
            whole = combine(zlib.crc32(view[summed:offset], whole), crc, length)
            summed = end
        elif end - summed >= RUN_BYTES:
            whole = zlib.crc32(view[summed:end], whole)
            summed = end
    return zlib.crc32(view[summed:], whole), sums
