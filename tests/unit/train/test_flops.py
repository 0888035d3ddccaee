"""Operations and speeds of all ranks make one number."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from hpctrain.comm.group import TIMEOUT_S, Group
from hpctrain.comm.world import World, alone
from hpctrain.train.data_sheets import sheet_per_s
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
        ([(0, 0, Flops(6, 2, 8)), (0, 0, Flops(6, 4, 10))], Flops(6, 3, 9)),
        ([(0, 0, Flops(6, 2, 8)), (0, 0, Flops(6, 4))], Flops(6, 3)),
    ],
)
def test_all_parts_of_a_model_count_alike_and_none_may_be_unknown(told, wanted):
    assert found(told) == wanted


def test_utilisation_is_of_the_data_sheets_peak_if_there_is_one():
    assert Flops(6.0, 60.0).utilisation(5.0) == 0.5
    assert Flops(6.0, 60.0, 100.0).utilisation(5.0) == 0.3


@pytest.mark.parametrize(
    ("name", "kind", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 PCIe", "tf32", 378.0),
        ("NVIDIA H200 NVL", "bf16", 835.5),
        ("NVIDIA GH200 480GB", "fp16", 989.4),
        ("NVIDIA A100-SXM4-80GB", "fp32", 19.5),
        ("Tesla V100-SXM2-32GB", "fp16", 125.0),
        ("Tesla V100-SXM2-32GB", "bf16", 0.0),
        ("AMD Instinct MI250X", "tf32", 0.0),
        ("Intel(R) Data Center GPU Max 1550", "bf16", 419.0),
        ("NVIDIA T4", "fp16", 0.0),
        ("NVIDIA RTX A4000", "bf16", 0.0),
        ("Tesla V100S-PCIE-32GB", "fp16", 0.0),
        ("NVIDIA GB200", "bf16", 0.0),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16", 0.0),
        ("NVIDIA A100-SXM4-80GB", "", 0.0),
    ],
)
def test_peaks_of_data_sheets_are_found_by_name_and_type(name, kind, tflops):
    assert sheet_per_s(name, kind) == pytest.approx(1e12 * tflops)
