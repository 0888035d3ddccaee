"""Combined checksums against zlib's."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.checkpoint import checksum


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_combine_is_the_checksum_of_both_in_a_row(first: bytes, second: bytes) -> None:
    combined = checksum.combine(zlib.crc32(first), zlib.crc32(second), len(second))
    assert combined == zlib.crc32(first + second)


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 400)), max_size=8), st.integers(0, 50), st.integers(1, 200)
)
def test_checksums_of_parts_and_whole(gaps_and_lengths: list[tuple[int, int]], tail: int, small: int) -> None:
    extents, position = [], 0
    for gap, length in gaps_and_lengths:
        extents.append((position + gap, length))
        position += gap + length
    buffer = np.random.default_rng(position).integers(0, 256, position + tail, dtype=np.uint8)
    data = buffer.tobytes()
    with pytest.MonkeyPatch.context() as patch:  # so that all ways are taken
        patch.setattr(checksum, "SMALL_BYTES", small)
        patch.setattr(checksum, "RUN_BYTES", 2 * small)
        whole, parts = checksum.checksums(buffer, extents)
    assert whole == zlib.crc32(data)
    assert parts == [zlib.crc32(data[offset : offset + length]) for offset, length in extents]
