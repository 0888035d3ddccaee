"""Operations and speeds of all ranks make one number."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from hpctrain.comm.group import TIMEOUT_S, Group
from hpctrain.comm.world import World, alone
from hpctrain.train.flops import Flops, of_all

Told = list[tuple[int, int, Flops | None]]
"""Of each rank: stage, tensor index, what it knows."""


class Said(Group):
    """What all ranks say, in place of this one."""

    def __init__(self, told: Told) -> None:
        super().__init__("said")
        self.told = told

    def allgather(self, value: Any, what: str, timeout_s: float = TIMEOUT_S) -> list[Any]:
        assert value == [[0, 0], None]
        return [[[stage, tensor], list(dataclasses.astuple(one)) if one else None] for stage, tensor, one in self.told]


def found(told: Told) -> Flops | None:
    me = alone()
    world: World = dataclasses.replace(me, everyone=Said(told))
    return of_all(None, world)


@pytest.mark.parametrize(
    ("told", "wanted"),
    [
        ([(0, 0, Flops(6, 2)), (0, 0, Flops(6, 4))], Flops(6, 3)),
        ([(0, 0, Flops(6, 2)), (0, 0, None)], Flops(6, 2)),
        ([(0, 0, Flops(6, 2)), (1, 0, Flops(0, 4))], Flops(3, 3)),
        ([(0, 0, Flops(6, 2)), (0, 0, None), (1, 0, Flops(2, 4)), (1, 0, Flops(2, 8))], Flops(4, 4)),
        ([(0, 0, Flops(6, 2)), (1, 0, None)], None),
        ([(0, 0, Flops(6, 2)), (0, 1, None)], None),
        ([(0, 0, Flops(0, 2)), (1, 0, Flops(0, 2))], None),
        ([(0, 0, None)], None),
    ],
)
def test_all_parts_of_a_model_count_alike_and_none_may_be_unknown(told: Told, wanted: Flops | None) -> None:
    assert found(told) == wanted
