"""The statistics against their definitions, and the replay tool against what it must find."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from hpctrain.bench.straggler import traces, trials
from hpctrain.monitor.chief import statistics
from hpctrain.monitor.chief.cause import cause_of
from hpctrain.monitor.window import CAUSES, GC
from hpctrain.train.clock import Phase

SECONDS = st.floats(1e-4, 10, allow_nan=False)
MATRICES = st.tuples(st.integers(2, 6), st.integers(1, 12)).flatmap(
    lambda shape: arrays(float, shape, elements=SECONDS)
)


@given(arrays(float, st.integers(2, 40), elements=SECONDS))
def test_median_of_others(values: np.ndarray) -> None:
    expected = [np.median(np.delete(values, rank)) for rank in range(len(values))]
    np.testing.assert_allclose(statistics.median_of_others(values), expected)


@given(MATRICES)
def test_cost_is_what_the_run_would_save(busy: np.ndarray) -> None:
    wait = busy.max(axis=0) - busy + 0.1
    total = (busy.max(axis=0) + 0.1).sum()
    for rank in range(len(busy)):
        without = np.delete(busy, rank, axis=0).max(axis=0)
        saved = np.maximum(busy.max(axis=0) - without, 0).sum() / total
        assert statistics.cost_of_each(busy, wait)[rank] == pytest.approx(saved, abs=1e-9)
        group = np.arange(len(busy)) == rank
        assert statistics.cost_of_group(busy, wait, group) == pytest.approx(saved, abs=1e-9)


@given(st.integers(2, 64), st.integers(1, 60), st.data())
def test_chance_of_so_many_is_the_binomial_tail(ranks: int, total: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, total))
    p = 1 / ranks
    exact = sum(math.comb(total, k) * p**k * (1 - p) ** (total - k) for k in range(count, total + 1))
    assert statistics.chance_of_so_many(count, total, ranks) == pytest.approx(exact, rel=1e-6)


@given(MATRICES)
def test_pauses_are_counted_as_runs_and_never_cost_more_than_the_excess(busy: np.ndarray) -> None:
    counts, seconds = statistics.pauses(busy)
    assert (counts <= (busy.shape[1] + 1) // 2).all()
    assert (seconds >= 0).all()
    assert (seconds[counts == 0] == 0).all()
    assert seconds.sum() <= (busy.max(axis=0) - np.median(busy, axis=0)).sum() + 1e-9 or len(busy) < 3


@given(MATRICES, st.floats(0.1, 10))
def test_constant_work_explains_nothing(busy: np.ndarray, work: float) -> None:
    assert (statistics.work_explains(busy, np.full_like(busy, work)) == 0).all()


NORMAL = np.zeros(len(CAUSES))
NORMAL[[Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER]] = 0.05, 0.3, 0.5, 0.15


@pytest.mark.parametrize(
    ("extra", "cause"),
    [
        ({Phase.DATA: 0.2}, "data"),
        ({Phase.DATA: 0.2, Phase.CALLBACKS: 0.04}, "data"),
        ({Phase.BACKWARD: 0.1}, "backward"),
        ({Phase.FORWARD: 0.2, GC: 0.19}, "gc"),
        ({Phase.DATA: 0.01, Phase.FORWARD: 0.06, Phase.BACKWARD: 0.1, Phase.OPTIMIZER: 0.03}, "compute"),
        ({Phase.FORWARD: 0.1, Phase.BACKWARD: 0.1}, "compute"),
        ({Phase.DATA: 0.1, Phase.CALLBACKS: 0.1}, "mixed"),
        ({}, "mixed"),
    ],
)
def test_causes(extra: dict[int, float], cause: str) -> None:
    seconds = np.zeros(len(CAUSES))
    for column, value in extra.items():
        seconds[column] = value
    assert cause_of(seconds, NORMAL) == cause


@pytest.mark.parametrize("where", trials.WHERE)
def test_the_replay_tool_finds_a_fifth_everywhere(where: Phase | None) -> None:
    cell = trials.run_cell(trials.from_simulation, 8, where, 0.2, trials=10, seed=1)
    assert (cell.right_rank, cell.right_cause, cell.innocents) == (1, 1, 0)
    assert cell.latency_p95 <= 96


def test_the_replay_tool_sees_that_other_quantities_and_rules_fail() -> None:
    rows = {row["detector"]: row["found"] for row in trials.compare(trials.from_simulation, 8, 0.2, 3, seed=1)}
    assert rows.pop("hpctrain") == 1
    assert set(rows.values()) == {0}


def test_resampled_traces_keep_a_recorded_rank_s_steps() -> None:
    rng = np.random.default_rng(0)
    recorded = traces.simulated(2, 200, rng)
    trial = traces.resampled(recorded, 5, 100, rng)
    assert trial.spent.shape == (5, 100, len(CAUSES))
    np.testing.assert_allclose(np.median(trial.busy()), np.median(recorded.busy()), rtol=0.05)


def test_a_window_of_ten_thousand_ranks_is_judged_in_a_blink() -> None:
    measured = trials.cost(10_000, windows=3)
    assert measured["seconds_per_window"] < 1
    assert measured["peak_bytes"] < 100 * 2**20
