"""Recommendations, text and charts of the scaling benchmark, on steps made up for each size."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from typing import Any

import numpy as np
import pytest

from hpctrain.bench.scaling import warnings
from hpctrain.bench.scaling_report import charts, efficiency, mode_result, recommend, text
from hpctrain.bench.scaling_runs import COMPUTE, EXCHANGE, Shape, Timing
from hpctrain.report.drawing import picture

SVG = "{http://www.w3.org/2000/svg}"
SIZES = [Shape(1, 1), Shape(1, 4), Shape(2, 4), Shape(4, 4)]


def timing(shape: Shape, compute_s: float, exchange_s: float = 0.0) -> Timing:
    parts = np.zeros((8, 4))
    parts[:, COMPUTE], parts[:, EXCHANGE] = compute_s, exchange_s
    parts[-1] *= 9  # an interval that another process disturbed
    return Timing(shape, 64, parts)


def test_a_step_is_what_its_parts_add_up_to_without_outliers():
    found = timing(Shape(1, 4), 0.3, 0.1)
    assert found.step_s == pytest.approx(0.4) and found.typical == pytest.approx([0.3, 0.1, 0, 0])


def test_efficiency_is_speed_a_rank():
    one, four = timing(Shape(1, 1), 2.0), timing(Shape(4, 1), 1.0)
    assert efficiency("weak", one, four) == pytest.approx(2.0)
    assert efficiency("strong", one, four) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("efficiencies", "ranks", "said"),
    [
        ([1, 0.9, 0.78, 0.6], 8, "worth it up to 2 nodes (8 ranks), at 78% efficiency; 4 nodes (16 ranks): 60%"),
        ([1, 0.6, 0.78, 0.8], 1, "worth it up to 1 node (1 rank), at 100% efficiency; 1 node (4 ranks): 60%"),
        ([1, 0.9, 0.8, 0.7], 16, "worth it up to 4 nodes (16 ranks), at 70% efficiency; nothing larger was measured"),
        ([0.5, 0.9], None, "not even 1 node (1 rank) reaches 70%"),
        ([1], None, "nothing to recommend, because fewer than two sizes have a core for each thread"),
    ],
)
def test_the_recommendation_is_the_last_size_that_is_efficient_enough(efficiencies, ranks, said):
    assert recommend(SIZES[: len(efficiencies)], efficiencies, 0.7) == (ranks, said)


def test_sizes_without_a_core_for_each_thread_are_marked_and_not_recommended():
    timings = [timing(shape, 0.1 * shape.ranks) for shape in SIZES]
    result: dict[str, Any] = {"run": "r", "framework": "torch", "reducer": "mpi-node", "gradient_bytes": 2**20}
    result |= {"threshold": 0.7, "threads": 1, "warnings": warnings(SIZES[2:], 4)}
    result["modes"] = {mode: mode_result(mode, timings, SIZES[2:], 0.7) for mode in ("weak", "strong")}  # type: ignore[arg-type]
    assert result["warnings"][0].startswith("8, 16 ranks have more threads than this machine's 4 cores")
    assert [row["oversubscribed"] for row in result["modes"]["weak"]["measured"]] == [False, False, True, True]
    assert result["modes"]["weak"]["recommended_ranks"] == 1 and warnings([], 4) == []
    assert text(result).count("more threads than cores") == 4
    names = {"".join(each.itertext()).strip() for each in ET.fromstring(picture(charts(result))).iter(f"{SVG}text")}
    both = {f"{mode}, {what}" for mode in ("weak", "strong") for what in ("measured", "ideal")}
    more = {f"{mode}, measured, more threads than cores" for mode in ("weak", "strong")}
    assert names >= both | more | {"ideal", "threshold", "1", "4", "8", "16"}
