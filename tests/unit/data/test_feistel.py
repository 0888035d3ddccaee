"""A permutation without memory is one, and looks like a random one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.data.order import LARGE_SAMPLES, FeistelPermutation, Order


def drawn(length: int, seed: int) -> FeistelPermutation:
    return FeistelPermutation.draw(length, np.random.default_rng(seed))


@given(length=st.integers(1, 3000), seed=st.integers(0, 2**32))
def test_every_number_comes_once(length, seed):
    assert np.array_equal(np.sort(drawn(length, seed)(0, length)), np.arange(length))


@given(length=st.integers(1, 2**60), seed=st.integers(0, 99), data=st.data())
def test_a_stretch_is_that_of_the_whole(length, seed, data):
    permutation = drawn(length, seed)
    begin = data.draw(st.integers(0, length - 1))
    end = min(length, begin + data.draw(st.integers(0, 50)))
    single = [permutation(index, index + 1)[0] for index in range(begin, end)]
    assert permutation(begin, end).tolist() == single
    assert all(0 <= each < length for each in single) and len(set(single)) == end - begin


def chi_squared(counts: np.ndarray) -> float:
    """Over its degrees of freedom: 1 for what is uniform, with a deviation of sqrt(2 / cells)."""
    expected = counts.sum() / counts.size
    return float(((counts - expected) ** 2 / expected).sum() / counts.size)


def test_it_mixes_like_a_random_one():
    n, cells = 300_007, 30
    found = drawn(n, 5)(0, n)
    where = np.histogram2d(np.arange(n), found, [cells, cells])[0]
    assert 0.8 < chi_squared(where) < 1.2  # 4 deviations of 0.047
    steps = np.histogram((found[1:] - found[:-1]) % n, cells**2)[0]
    assert 0.8 < chi_squared(steps) < 1.2
    other = drawn(n, 6)(0, n)
    assert abs(np.corrcoef(found, other)[0, 1]) < 0.01  # 5 deviations of 1 / sqrt(n)


@pytest.mark.parametrize("length", [LARGE_SAMPLES, 10**12])
def test_large_data_is_shuffled_without_memory(length):
    order = Order(length, 64, seed=7)
    first = order.batch_indices(0, 0)
    assert len(set(first.tolist())) == 64 and first.max() > length // 2, "not as stored"
    assert not np.array_equal(first, order.batch_indices(1, 0))
    assert not np.array_equal(first, Order(length, 64, seed=8).batch_indices(0, 0))
    half = Order(length, 32, seed=7)
    assert np.array_equal(first, np.concatenate([half.batch_indices(0, 0), half.batch_indices(0, 1)]))


def test_the_order_is_pinned():
    """A changed order breaks resuming: the numbers here may only change with a note in the change log."""
    assert Order(LARGE_SAMPLES, 4, seed=7).batch_indices(3, 0).tolist() == [8507365, 3776958, 3702269, 6624282]
