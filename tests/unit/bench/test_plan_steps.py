"""Seconds of a step under plans that share out a model, by numbers computed by hand."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpctrain.bench.scaling import plan_steps
from hpctrain.bench.scaling.fit import Amdahl, ExchangeModel, Link, Shape
from hpctrain.bench.scaling.measured import Measured, measured, read
from hpctrain.bench.scaling.model import Gradients, StepModel, Timing
from hpctrain.bench.scaling.plan_steps import Batch, PlanStep, data_shape, plan_step, stage_link
from hpctrain.errors import UserError
from hpctrain.parallel.plan import Plan, Sums, Weighed

INSIDE, BETWEEN = Link(1e-5, 1e-9), Link(1e-4, 1e-8)
LINKS = ExchangeModel(INSIDE, BETWEEN)
STEPS = StepModel(Amdahl(0, 0), LINKS, Gradients(0, through_mpi=True), excess_s=0.002)
KNOWN = Measured(fixed_s=0.1, sample_s=0.01, waits_s=0.005, steps=STEPS)
MODEL = Weighed(
    parameters=8_000_000,
    gradients=8_000_000,
    optimizer=16_000_000,
    averages=0,
    activations=1e6,
    checkpoint=24_000_000,
    exchanged=8_000_000,
    sums=Sums(count=10, bytes=50_000),
    handed_on=20_000,
)
BATCH = Batch(samples=64, micro_batches=4)


def test_ranks_with_whole_models_compute_their_part_and_exchange() -> None:
    step = plan_step(Plan(1, 4, "none"), MODEL, BATCH, None, KNOWN)
    # 6 messages of 10 us, 1.5 x 8 MB at 1 GB/s, and the 2 ms that runs took beyond it
    assert step == PlanStep(0.005, 0.1 + 16 * 0.01, 0, 0, 0, pytest.approx(6e-5 + 0.012 + 0.002))
    assert step is not None and step.total_s == pytest.approx(0.005 + 0.26 + 0.01406)


def test_a_sharded_optimizer_moves_as_many_bytes_and_sharded_parameters_more() -> None:
    plain = plan_steps.exchange_s(STEPS, Shape(1, 4), 8_000_000, 1)
    assert plain == pytest.approx(6e-5 + 0.012 + 0.002)
    assert [plan_steps.exchanges(one, 4) for one in ("none", "optimizer", "parameters")] == [1, 1, 4.5]
    sharded = plan_step(Plan(1, 4, "parameters"), MODEL, BATCH, None, KNOWN)
    assert sharded is not None and sharded.exchange_s == pytest.approx(6e-5 + 4.5 * 0.012 + 0.002)


def test_lookups_in_tables_of_others_take_messages_to_each() -> None:
    # 10 messages to each of 3 others in each of 4 micro-batches; 3/4 of 16 x 1 MB at 1 GB/s
    lookups = Sums(count=10, bytes=1e6)
    model = dataclasses.replace(MODEL, exchanged=4_000_000, lookups=lookups)
    step = plan_step(Plan(1, 4, "tables"), model, BATCH, None, KNOWN)
    rows = 120 * 1e-5 + 0.75 * 16e6 * 1e-9
    assert step is not None and step.exchange_s == pytest.approx(6e-5 + 0.006 + 0.002 + rows)
    # two nodes of two: 3 others, and two ranks share a node's link
    assert plan_steps.lookups_s(lookups, Shape(2, 2), 16, 4, LINKS) == pytest.approx(120 * 1e-4 + 0.75 * 16e6 * 2e-8)


def test_a_tensor_group_computes_its_part_and_adds_up_activations() -> None:
    # 10 sums in each of 4 micro-batches: 2 messages of 10 us each; 50 kB of each of 32 samples go over the link once
    assert plan_steps.sums_s(MODEL.sums, 2, 32, 4, INSIDE) == pytest.approx(40 * 2e-5 + 50_000 * 32 * 1e-9)
    step = plan_step(Plan(2, 2, "none"), MODEL, BATCH, None, KNOWN)
    assert step is not None and (step.messages_s, step.bubble_s) == (0, 0)
    assert step.compute_s == pytest.approx((0.1 + 32 * 0.01) / 2) and step.sums_s == pytest.approx(0.0024)


def test_stages_compute_their_part_hand_on_and_wait() -> None:
    # a message forward and one back in each of 4 micro-batches of 10 us, and 20 kB of each of 64 samples
    assert plan_steps.messages_s(20_000 * 64, 4, INSIDE) == pytest.approx(8e-5 + 0.00128)
    step = plan_step(Plan(1, 1, "none", 4), MODEL, BATCH, None, KNOWN)
    assert step is not None and step.exchange_s == 0
    assert step.compute_s == pytest.approx((0.1 + 64 * 0.01) / 4)
    busy = step.compute_s + step.messages_s
    assert step.bubble_s / (busy + step.bubble_s) == pytest.approx(3 / 7), "(P - 1) / (M + P - 1)"
    both = plan_step(Plan(2, 1, "none", 2), MODEL, BATCH, None, KNOWN)
    assert both is not None
    assert both.sums_s == pytest.approx(plan_steps.sums_s(MODEL.sums, 2, 64, 4, INSIDE) / 2), "half of the layers"


@pytest.mark.parametrize(
    ("plan", "node", "shape"),
    [
        (Plan(1, 8, "none"), None, Shape(1, 8)),
        (Plan(1, 8, "none"), 4, Shape(2, 4)),
        (Plan(2, 4, "none"), 4, Shape(2, 2)),
        (Plan(2, 2, "none", 2), 4, Shape(1, 2)),
        (Plan(4, 2, "none"), 4, Shape(2, 1)),
    ],
)
def test_places_of_ranks_with_the_same_part(plan: Plan, node: int | None, shape: Shape) -> None:
    assert data_shape(plan, node) == shape


def test_ranks_of_a_node_share_its_link() -> None:
    assert plan_steps.shared(BETWEEN, 4) == Link(1e-4, 4e-8)
    # two groups of a node: 2 messages of 100 us, and 2 x 4 MB at 100 MB/s; nothing inside, with one rank each
    exchanged = plan_steps.exchange_s(STEPS, Shape(2, 1), 4_000_000, 2)
    assert exchanged == pytest.approx(2e-4 + 0.08 + 0.002)
    assert stage_link(Plan(1, 2, "none", 2), None, LINKS) == INSIDE
    assert stage_link(Plan(1, 2, "none", 2), 4, LINKS) == INSIDE
    assert stage_link(Plan(1, 4, "none", 2), 4, LINKS) == plan_steps.shared(BETWEEN, 4)


def test_what_was_not_measured_is_not_told() -> None:
    one_rank = Measured(0, 0.01, 0, StepModel(Amdahl(0, 0), ExchangeModel(), Gradients(0, True)))
    assert plan_step(Plan(1, 1, "none"), MODEL, BATCH, None, one_rank) is not None
    for plan in (Plan(1, 2, "none"), Plan(2, 1, "none"), Plan(1, 1, "none", 2)):
        assert plan_step(plan, MODEL, BATCH, None, one_rank) is None
    one_node = Measured(0, 0.01, 0, StepModel(Amdahl(0, 0), ExchangeModel(INSIDE), Gradients(0, True)))
    assert plan_step(Plan(1, 8, "none"), MODEL, BATCH, 8, one_node) is not None
    assert plan_step(Plan(1, 8, "none"), MODEL, BATCH, 4, one_node) is None
    assert plan_step(Plan(1, 4, "none", 2), MODEL, BATCH, 4, one_node) is None


def timing(ranks: int, batch: int, compute_s: float, exchange_s: float = 0.0) -> Timing:
    return Timing(Shape(1, ranks), batch, np.array([[compute_s, exchange_s, 0.001, 0.002]]))


def test_computing_grows_with_samples_from_a_fixed_time_on() -> None:
    exchange, gradients = ExchangeModel(INSIDE), Gradients(1_000_000, True)
    took = INSIDE.seconds(2, 1_000_000) + 0.004
    of_two = measured([timing(1, 16, 9), timing(2, 32, 0.26, took), timing(2, 16, 0.18, took)], exchange, gradients)
    assert of_two.compute_s(4) == pytest.approx(0.1 + 4 * 0.01), "of the fullest node alone"
    assert of_two.waits_s == pytest.approx(0.003) and of_two.steps.excess_s == pytest.approx(0.004)
    of_one = measured([timing(1, 16, 0.16)], exchange, gradients)
    assert of_one.compute_s(4) == pytest.approx(0.04), "in proportion"


def row(ranks: int, batch: int, compute_s: float, crowded: bool = False) -> dict[str, Any]:
    parts = {"compute_s": compute_s, "exchange_s": 0.01, "data_s": 0.001, "rest_s": 0.002}
    return {"nodes": 1, "ranks": ranks, "global_batch": batch, "oversubscribed": crowded, **parts}


RESULT: dict[str, Any] = {
    "parallel": {"tensor": 1, "pipeline": 1, "shard": "none"},
    "reducer": "mpi-node",
    "gradient_bytes": 8000,
    "exchange": {"inside_node": {"alpha_s": 1e-6, "bytes_per_s": 1e9}, "between_nodes": None},
    "modes": {"strong": {"measured": [row(2, 32, 0.26), row(2, 16, 0.18), row(4, 32, 9.0, crowded=True)]}},
}


def test_a_folder_is_read(tmp_path: Path) -> None:
    (tmp_path / "scaling.json").write_text(json.dumps(RESULT))
    found = read(tmp_path)
    assert found.compute_s(4) == pytest.approx(0.1 + 4 * 0.01), "without sizes with more threads than cores"
    assert found.steps.exchange == ExchangeModel(Link(1e-6, 1e-9)) and found.steps.gradients.bytes == 8000


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"parallel": {"tensor": 2, "pipeline": 1, "shard": "none"}}, "ranks that share out a model"),
        ({"modes": {"weak": {"measured": [row(2, 8, 1.0, crowded=True)]}}}, "a core for each thread"),
        ({"modes": {"weak": {"measured": [{"nodes": 1}]}}}, "not what this version measures"),
        ({"exchange": {}}, "not what this version measures"),
        ({"exchange": 3}, "not what this version measures"),
        ({"gradient_bytes": 1e400}, "not what this version measures"),
        ({"gradient_bytes": None}, "not what this version measures"),
        (
            {"exchange": {"inside_node": {"alpha_s": 1e400, "bytes_per_s": 1e9}}},
            "not what this version measures",
        ),
        ({"exchange": {"inside_node": {"alpha_s": 1e-6, "bytes_per_s": -1e9}}}, "not what this version measures"),
        ({"modes": {"weak": {"measured": [row(0, 8, 1.0)]}}}, "not what this version measures"),
        ({"modes": {"weak": {"measured": [row(2, 8, 1.0) | {"nodes": 4}]}}}, "not what this version measures"),
        ({"modes": {"weak": {"measured": [row(2, 8, 0.0)]}}}, "not what this version measures"),
        ({"modes": {"weak": {"measured": [row(2, 8, -1.0)]}}}, "not what this version measures"),
        ({"modes": {"weak": {"measured": [row(2, 10**400, 1.0)]}}}, "not what this version measures"),
    ],
)
def test_a_folder_of_something_else_is_refused(tmp_path: Path, change: dict[str, Any], sentence: str) -> None:
    (tmp_path / "scaling.json").write_text(json.dumps({**RESULT, **change}))
    with pytest.raises(UserError, match=sentence):
        read(tmp_path)
    with pytest.raises(UserError, match="cannot be read"):
        read(tmp_path / "nowhere")
