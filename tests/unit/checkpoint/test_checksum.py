"""Combined checksums against zlib's."""

from __future__ import annotations

import subprocess
import sys
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from hpctrain.checkpoint.format import checksum


def summed(buffer: NDArray[np.uint8], extents: list[tuple[int, int]], block_bytes: int) -> list[int]:
    """From blocks that come last first, twice: each write of an image sums it up again."""
    sums = checksum.Checksums(buffer, extents, block_bytes)
    for begin in 2 * list(range(0, buffer.size, block_bytes))[::-1]:
        sums.add(begin // block_bytes, begin, min(buffer.size, begin + block_bytes))
    return sums.result()


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(1, 400)), max_size=8), st.integers(0, 50), st.integers(10, 900)
)
def test_checksums_of_parts(gaps_and_lengths: list[tuple[int, int]], tail: int, block_bytes: int) -> None:
    extents, position = [], 0
    for gap, length in gaps_and_lengths:
        extents.append((position + gap, length))
        position += gap + length
    buffer = np.random.default_rng(position).integers(0, 256, position + tail, dtype=np.uint8)
    data = buffer.tobytes()
    assert summed(buffer, extents, block_bytes) == [
        zlib.crc32(data[offset : offset + length]) for offset, length in extents
    ]


@pytest.mark.parametrize("size", [70_000, (1 << 24) + 12_345])
def test_a_part_of_many_blocks(size: int) -> None:
    buffer = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    extents = [(0, 3), (7, 300), (400, size - 400)]
    found = summed(buffer, extents, 1 << 16)
    assert found == [zlib.crc32(buffer[offset : offset + length]) for offset, length in extents]


def test_a_shift_beyond_4_gib_is_the_product_of_two_shorter_ones() -> None:
    far, half = checksum.shift(np.array([6 << 30])), checksum.shift(np.array([3 << 30]))
    assert far == checksum.multiply(half, half)


def test_without_isal_sums_are_those_of_zlib() -> None:
    code = "import sys; sys.modules['isal'] = None; from hpctrain.checkpoint.format import checksum as c; "
    subprocess.run([sys.executable, "-c", code + "assert c.crc32.__module__ == 'zlib'"], check=True, timeout=60)
