"""Ranks that make equally many passes: who has no batch left gets another rank's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hpctrain.comm.group import TIMEOUT_S, Group
from hpctrain.train.evaluation import even_batches, even_passes
from tests.support.thread_groups import ThreadGroup, in_threads


class Sharing(Group):
    """A thread group whose ranks can also take over what one of them has."""

    def __init__(self, group: Group) -> None:
        assert isinstance(group, ThreadGroup)
        super().__init__("threads")
        self.inner, self.rank, self.size = group, group.rank, group.size

    def gather(self, values: Any, what: str, timeout_s: float = TIMEOUT_S) -> Any:
        return self.inner.gather(values, what, timeout_s)

    def broadcast(self, value: Any, what: str, root: int = 0, timeout_s: float = TIMEOUT_S) -> Any:
        self.inner.table[self.rank] = value
        self.inner.meeting.wait(timeout_s)
        found = self.inner.table[root]
        self.inner.meeting.wait(timeout_s)
        return found

    def broadcast_array(self, values: Any, what: str, root: int = 0, timeout_s: float = TIMEOUT_S) -> None:
        values[...] = self.broadcast(values, what, root, timeout_s)


@pytest.mark.parametrize("counts", [(2, 2), (3, 1, 0), (0, 2), (0, 0)])
def test_all_make_as_many_passes_as_the_one_with_most(counts):
    def passes(group):
        batches = [{"id": np.array([group.rank, number])} for number in range(counts[group.rank])]
        found = [(batch["id"].tolist(), is_own) for batch, is_own in even_batches(batches, Sharing(group))]
        known, fewest = even_passes(batches, Sharing(group))
        assert [(batch["id"].tolist(), is_own) for batch, is_own in known] == found and fewest == min(counts)
        return found

    for rank, found in enumerate(in_threads(len(counts), passes)):
        assert len(found) == max(counts)
        assert found[: counts[rank]] == [([rank, number], True) for number in range(counts[rank])]
        lenders = [next(one for one, count in enumerate(counts) if count > number) for number in range(max(counts))]
        assert found[counts[rank] :] == [
            ([lenders[number], number], False) for number in range(counts[rank], max(counts))
        ]


def test_without_a_meeting_each_makes_its_own():
    batches = [{"id": np.zeros(1)}] * 3
    assert [is_own for _, is_own in even_batches(batches, None)] == [True] * 3
    assert even_passes(batches, None) == ([(batch, True) for batch in batches], 3)
