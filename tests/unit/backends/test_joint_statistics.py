"""Statistics of parts are those of the whole, and ranks that are in different layers learn it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from hpctrain.backends.joint_statistics import JointStatistics, merged
from hpctrain.comm.group import Group
from hpctrain.errors import UserError
from hpctrain.train.clock import IntervalClock


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(0, 7), min_size=1, max_size=5).filter(any),
    offset=st.floats(-1e6, 1e6),
    seed=st.integers(0, 99),
)
def test_statistics_of_parts_are_those_of_the_whole(sizes, offset, seed):
    random = np.random.default_rng(seed)
    parts = [random.normal(offset, 1.0, (size, 3)) for size in sizes]
    means = [part.mean(0) if len(part) else np.zeros(3) for part in parts]
    squares = [((part - mean) ** 2).sum(0) for part, mean in zip(parts, means, strict=True)]
    found = merged(np.array(sizes, float), np.array(means), np.array(squares))
    whole = np.concatenate(parts)
    assert found.count == len(whole)
    np.testing.assert_allclose(found.mean, whole.mean(0), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(found.squares, whole.var(0) * len(whole), rtol=1e-8, atol=1e-8)


class Beside(Group):
    """A group of two whose other rank is said to send what this one sends, changed."""

    def __init__(self, change: tuple[int, float]) -> None:
        super().__init__("two")
        self.size, self.change = 2, change

    def gather(self, values: NDArray[Any], what: str, timeout_s: float = 1.0) -> NDArray[Any]:
        """See Group."""
        other = values.copy()
        other[self.change[0]] += self.change[1]
        return np.stack([values, other])


@pytest.mark.parametrize("place", [0, 1, 2])
def test_ranks_in_different_layers_learn_it(place):
    statistics = JointStatistics(Group("alone"), IntervalClock())
    statistics.group = Beside((place, 1.0))
    with pytest.raises(UserError, match="different BatchNorm layers of the forward pass"):
        statistics.merge(2, np.zeros(3), np.ones(3))


def test_one_rank_gets_its_own():
    statistics = JointStatistics(Group("alone"), IntervalClock())
    statistics.begin_update(2)
    statistics.begin_micro_batch(1)
    found = statistics.merge(2, np.array([3.0]), np.array([4.0]))
    assert (found.count, found.mean, found.squares) == (2, 3.0, 4.0)
    assert statistics.add(np.array([1.0, 2.0])).tolist() == [1.0, 2.0]
    assert not statistics.passed_over
    statistics.close()
