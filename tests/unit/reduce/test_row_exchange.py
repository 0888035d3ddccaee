"""Rows of tables that travel alone."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.reduce.row_exchange import SparseRows, added, in_messages, rows_are_fewer

ROWS = 12


def rows(indices: set[int], seed: int) -> SparseRows:
    """Of a table with three columns."""
    values = np.random.default_rng(seed).normal(size=(len(indices), 3)).astype(np.float32)
    return SparseRows(np.array(sorted(indices), np.int64), values)


def whole(part: SparseRows) -> np.ndarray:
    table = np.zeros((ROWS, 3), np.float32)
    table[part.indices] = part.values
    return table


@given(st.lists(st.sets(st.integers(0, ROWS - 1)), min_size=1, max_size=5))
def test_the_sum_of_rows_is_that_of_whole_tables_bit_for_bit(indices):
    parts = [rows(each, seed) for seed, each in enumerate(indices)]
    total = added(parts)
    assert total.indices.tolist() == sorted(set().union(*indices))
    np.testing.assert_array_equal(whole(total), sum((whole(part) for part in parts), np.zeros((ROWS, 3), np.float32)))


def test_the_way_with_fewer_bytes_is_taken():
    assert rows_are_fewer(total=8192, rows=500_000, columns=16, item_bytes=4)
    assert not rows_are_fewer(total=900_000, rows=500_000, columns=16, item_bytes=4)
    assert rows_are_fewer(total=0, rows=1, columns=1, item_bytes=4)
    assert not rows_are_fewer(total=2**26, rows=10**9, columns=16, item_bytes=4)  # too many for one message


def test_no_message_of_several_tables_is_too_large():
    assert in_messages({0: 40, 1: 60, 3: 1, 4: 120, 5: 0}, 100) == [[0, 1], [3], [4], [5]]
    assert in_messages({2: 2**27, 3: 2**27}, 2**28) == [[2, 3]]
    assert in_messages({}, 100) == []
