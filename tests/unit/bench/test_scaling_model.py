"""Predictions, recommendations and the text of the scaling benchmark, on runs made up from known constants."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from typing import Any

import numpy as np
import pytest

from hpctrain.bench import scaling
from hpctrain.bench import scaling_model as model
from hpctrain.bench import scaling_report as report
from hpctrain.bench.scaling_model import (
    COMPUTE,
    EXCHANGE,
    ExchangeModel,
    Mode,
    Prediction,
    RingLink,
    Sample,
    Shape,
    StepGradients,
    Timing,
    efficiency,
    predict,
)
from hpctrain.bench.scaling_report import recommend, text
from hpctrain.run.events import RunStarted
from tests.unit.bench.test_scaling_fit import exchanges

LINKS = ExchangeModel(RingLink(2e-6, 1e-10), RingLink(5e-5, 1e-9))
GRADIENTS = StepGradients(bytes=20_000_000, through_mpi=True)
WORK_S = 0.1
SVG = "{http://www.w3.org/2000/svg}"


def timing(shape: Shape, mode: Mode, noise: float = 0.01, overhead_s: float = 0.003) -> Timing:
    """What a run of such a model would show; ``overhead_s``: waiting for other ranks."""
    random = np.random.default_rng(shape.ranks)
    parts = np.zeros((18, 4))
    parts[:, COMPUTE] = WORK_S / (shape.ranks if mode == "strong" else 1)
    if shape.ranks > 1:
        parts[:, EXCHANGE] = LINKS.seconds(shape, GRADIENTS.bytes) + overhead_s
    return Timing(shape, 64, parts * (1 + noise * random.standard_normal((18, 1))))


def truth(shape: Shape, mode: Mode) -> float:
    return float(timing(shape, mode, noise=0.0).step_s)


@pytest.mark.parametrize("mode", ["weak", "strong"])
def test_more_nodes_are_predicted_within_the_bounds(mode: Mode) -> None:
    shapes = [Shape(1, 1), Shape(1, 4), Shape(2, 4)]
    larger = [Shape(4, 4), Shape(8, 4)]
    samples = exchanges(LINKS, shapes[1:], noise=0.02)
    found = predict(mode, [timing(shape, mode) for shape in shapes], samples, GRADIENTS, larger)
    for each in found:
        assert each.step_s == pytest.approx(truth(each.shape, mode), rel=0.1)
        assert each.low_s <= truth(each.shape, mode) <= each.high_s
        assert each.low <= each.efficiency <= each.high


def test_with_several_nodes_only_they_tell_how_far_exchanges_are_from_the_model() -> None:
    own = StepGradients(GRADIENTS.bytes, through_mpi=False)
    timings = [timing(shape, "weak", noise=0, overhead_s=0) for shape in (Shape(1, 2), Shape(2, 2))]
    for each, factor in zip(timings, (0.1, 0.5), strict=True):
        each.parts[:, EXCHANGE] *= factor
    assert model.fit_steps("weak", timings, LINKS, own).scale == pytest.approx(0.5)


def bounds_s(noise: float, shape: Shape) -> float:
    """Width of a prediction from runs of one node and two."""
    shapes = [Shape(1, 1), Shape(2, 1)]
    timings = [timing(each, "weak", noise) for each in shapes]
    (found,) = predict("weak", timings, exchanges(LINKS, shapes[1:], noise=noise), GRADIENTS, [shape])
    return found.high_s - found.low_s


def test_noise_widens_the_bounds() -> None:
    assert bounds_s(0.1, Shape(2, 1)) > 3 * bounds_s(0.01, Shape(2, 1))


def test_what_was_not_measured_has_wider_bounds() -> None:
    exchange_s = ExchangeModel(between=LINKS.between).seconds(Shape(8, 1), GRADIENTS.bytes)
    assert bounds_s(0.0, Shape(2, 1)) < 0.001 * WORK_S
    assert bounds_s(0.0, Shape(8, 1)) > 2 * 0.25 * exchange_s


def test_by_other_means_than_mpi_the_model_is_scaled_to_the_runs() -> None:
    shapes = [Shape(1, 1), Shape(2, 1)]
    timings = [timing(shape, "weak", noise=0.0, overhead_s=0.0) for shape in shapes]
    slower = ExchangeModel(between=RingLink(10 * 5e-5, 10 * 1e-9))
    (found,) = predict(
        "weak", timings, exchanges(slower, shapes[1:]), StepGradients(GRADIENTS.bytes, False), [Shape(4, 1)]
    )
    between = ExchangeModel(between=LINKS.between)
    assert found.exchange_s == pytest.approx(between.seconds(Shape(4, 1), GRADIENTS.bytes), rel=0.01)


def test_efficiency_is_speed_a_rank() -> None:
    one, four = Shape(1, 1), Shape(4, 1)
    assert efficiency("weak", one, 2.0, four, 2.5) == pytest.approx(0.8)
    assert efficiency("strong", one, 2.0, four, 0.5) == pytest.approx(1.0)
    assert efficiency("strong", one, 2.0, four, 1.0) == pytest.approx(0.5)


def row(nodes: int, value: float, high: float | None = None) -> Prediction:
    return Prediction(Shape(nodes, 4), 0.1, 0.09, 0.11, 0.03, value, value - 0.05, high or value + 0.05)


def test_the_recommendation_is_the_last_size_that_is_efficient_enough() -> None:
    rows = [row(1, 1.0), row(2, 0.9), row(4, 0.78), row(8, 0.6), row(16, 0.71)]
    advice = recommend("weak", rows, 0.7)
    assert advice.shape == Shape(4, 4)
    assert advice.sentence == (
        "weak scaling: worth it up to 4 nodes (16 ranks), at 78% efficiency (73% to 83%); 8 nodes (32 ranks) would "
        "have 60% efficiency (55% to 65%); exchange would take 30% of a step"
    )


def test_a_recommendation_knows_its_limits() -> None:
    assert "nothing larger was considered" in recommend("weak", [row(1, 1.0), row(2, 0.9)], 0.7).sentence
    assert "might still reach 70%" in recommend("weak", [row(1, 1.0), row(2, 0.66, high=0.75)], 0.7).sentence
    nothing = recommend("strong", [row(1, 0.5)], 0.7)
    assert nothing.shape is None and "not even 1 node (4 ranks)" in nothing.sentence


def analysed(shapes: list[Shape], crowded: list[Shape], variant: str = "mpi-node", **more: Any) -> dict[str, Any]:
    modes: list[Mode] = ["weak", "strong"]
    samples = [sample for sample in exchanges(LINKS, [shape for shape in shapes if shape.ranks > 1], noise=0.01)]
    started = RunStarted(
        step=0, framework="torch", reducer="mpi", reducer_variant=variant, gradient_bytes=GRADIENTS.bytes
    )
    by_mode = {mode: [timing(shape, mode) for shape in shapes] for mode in modes}
    options = {"assumed": None, "cores": None, "threshold": 0.7} | more
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "DRAWS", 10)  # how wide the bounds are is tested above
        found = scaling.analyse(by_mode, samples, started, crowded, **options)
    return {"run": "r", "threshold": 0.7, "threads": 1} | found


def test_sizes_without_a_core_for_each_thread_are_told_and_left_out() -> None:
    shapes = [Shape(1, 1), Shape(1, 2), Shape(1, 4)]
    result = analysed(shapes, [Shape(1, 4)], cores=2)
    assert "4 ranks have more threads than this machine's 2 cores" in result["warnings"][0]
    assert [row["oversubscribed"] for row in result["modes"]["weak"]["measured"]] == [False, False, True]
    assert [row["ranks"] for row in result["modes"]["weak"]["predicted"]] == [1, 2]
    assert {row["ranks"] for row in result["exchange"]["measured"]} == {2}
    assert "more threads than cores" in text(result)


def test_of_one_size_nothing_is_recommended() -> None:
    result = analysed([Shape(1, 1), Shape(1, 2)], [Shape(1, 2)], cores=1)
    assert "fewer than two sizes" in result["modes"]["weak"]["recommendation"]
    assert result["modes"]["weak"]["recommended_ranks"] is None


def test_a_slow_allreduce_is_told() -> None:
    shape = Shape(3, 1)
    allreduce = [Sample(shape, 2**22, 0.6), Sample(shape, 2**22, 0.62), Sample(shape, 2**12, 1e-4)]
    assert scaling.allreduce_over_ring([*allreduce, Sample(shape, 2**22, 0.2, ring=True)]) == pytest.approx(3.05)
    assert scaling.allreduce_over_ring(allreduce) is None
    (warning,) = scaling.warnings([], None, True, True, 3.05)
    assert "3.0 times as long as our ring" in warning
    assert scaling.warnings([], None, True, True, 1.1) == []


def test_only_exchanges_by_the_means_of_the_runs_count() -> None:
    result = analysed([Shape(1, 1), Shape(2, 1)], [], variant="mpi-ring")
    assert result["exchange"]["measured"] == [], "those of the made-up measurements are Allreduces"


def test_an_assumed_link_leads_to_more_nodes_and_says_so() -> None:
    shapes = [Shape(1, 1), Shape(1, 2)]
    without = analysed(shapes, [], cores=2)
    assert any("no size spans two nodes" in warning for warning in without["warnings"])
    assert all(row["nodes"] == 1 for row in without["modes"]["weak"]["predicted"])
    result = analysed(shapes, [], cores=2, assumed=scaling.parse_link("10,20"))
    assert [row["nodes"] for row in result["modes"]["weak"]["predicted"]] == [1, 1, 2, 4, 8, 16]
    assert result["exchange"]["between_nodes_assumed"]
    assert "exchange between nodes (assumed): 20 us a message, 1.25 GB/s" in text(result)


@pytest.mark.parametrize("crowded", [[], [Shape(2, 4)], [Shape(1, 4), Shape(2, 4)]])
def test_the_picture_shows_both_modes_measured_expected_and_ideal(crowded: list[Shape]) -> None:
    result = analysed([Shape(1, 1), Shape(1, 4), Shape(2, 4)], crowded)
    drawing = ET.fromstring(report.draw(result))
    names = {"".join(element.itertext()).strip() for element in drawing.iter(f"{SVG}text")}
    expected = {f"{mode}, {what}" for mode in ("weak", "strong") for what in ("measured", "ideal")}
    expected |= {"ideal", "threshold", "1", "4", "8"}
    modelled = {"weak, model", "strong, model"}
    assert names >= expected and (names >= modelled) is (len(crowded) < 2)
    more = {f"{mode}, measured, more threads than cores" for mode in ("weak", "strong")}
    assert (names >= more) is bool(crowded)
