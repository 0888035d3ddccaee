"""Ranks that trained apart become equal again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.train.state import ArrayTensor, Placement
from hpctrain.train.stateful import make_equal
from tests.support.thread_groups import in_threads


class Source:
    """State of a rank."""

    def __init__(self, rank: int) -> None:
        self.arrays = {
            "model/weight": np.array([[1.0, 2.0]], np.float32) * (rank + 1),
            "optimizer/count": np.array(rank + 4),
            "optimizer/average": np.array(rank + 4.0),
            "model/statistics": np.array([rank], np.float32),
            "model/half": np.array([0x3F80, 0x4040, 0x40A0][rank], np.uint16),  # 1, 3 and 5 in bfloat16
            "model/complex": np.array([3j * rank]),
        }

    def state(self) -> list[ArrayTensor]:
        own = {"model/statistics": Placement.RANK}
        kinds = {"model/half": "bfloat16"}
        return [
            ArrayTensor(name, one, own.get(name, Placement.REPLICATED), logical_dtype=kinds.get(name))
            for name, one in self.arrays.items()
        ]

    def load(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        self.arrays |= arrays


def test_the_mean_of_numbers_and_the_count_of_the_first_rank():
    def work(group):
        source = Source(group.rank)
        make_equal(source, group)  # type: ignore[arg-type]
        return {name: array.tolist() for name, array in source.arrays.items()}

    found = in_threads(3, work)
    assert [one.pop("model/statistics") for one in found] == [[0.0], [1.0], [2.0]]
    wanted = {"model/weight": [[2.0, 4.0]], "optimizer/count": 4, "optimizer/average": 5.0}
    wanted |= {"model/half": 0x4040, "model/complex": [3j]}
    assert found == [wanted] * 3
