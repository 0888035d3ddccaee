"""The order in which streamed sums are formed: one tree over all ranks, however many are on a node."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hpctrain.comm.group import Group
from hpctrain.reduce.shm_allreduce import add_pairwise
from hpctrain.reduce.streamed_allreduce import SumPiece

LENGTH = 1000


class Node(Group):
    """One of several."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__("peers")
        self.rank, self.size = rank, size


class Wire:
    """Takes what is sent."""

    def Isend(self, *message: Any) -> None:
        """Nothing is awaited."""


def summed(ranks: int, per_node: int, adder: int) -> np.ndarray[Any, Any]:
    """By the rank that adds up, which has the others' sums by then."""
    terms = [np.random.default_rng(rank).standard_normal(LENGTH).astype(np.float32) for rank in range(ranks)]
    nodes = [terms[at : at + per_node] for at in range(0, ranks, per_node)]
    for node in nodes:
        add_pairwise(node, node[0])
    group = Node(adder, len(nodes))
    piece = SumPiece(group, None if group.size == 2 else adder, slice(0, LENGTH), nodes[adder][0], None)
    for number, row in piece.rows.items():
        row[:] = nodes[number][0]
    piece.finish(Wire(), adder, np.empty((0, LENGTH), np.float32))  # type: ignore[arg-type]
    return piece.values


@pytest.mark.parametrize(("ranks", "per_node"), [(6, 1), (6, 2), (8, 1), (8, 2), (8, 4), (12, 4), (7, 1)])
def test_the_same_ranks_give_the_same_bits_on_any_number_of_nodes(ranks, per_node):
    wanted = summed(ranks, ranks, 0)
    for adder in range(ranks // per_node):
        np.testing.assert_array_equal(summed(ranks, per_node, adder), wanted)
