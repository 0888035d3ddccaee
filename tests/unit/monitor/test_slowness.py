"""The statistics against their definitions, and the replay tool against what it must find."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from benchmarks.straggler import traces, trials
from hpctrain.monitor.chief import slowness
from hpctrain.monitor.chief.slowness import cause_of
from hpctrain.monitor.window import CAUSES, GC
from hpctrain.train.clock import Phase

SECONDS = st.floats(1e-4, 10, allow_nan=False)
MATRICES = st.tuples(st.integers(2, 6), st.integers(1, 12)).flatmap(
    lambda shape: arrays(float, shape, elements=SECONDS)
)


@given(arrays(float, st.integers(2, 40), elements=SECONDS))
def test_median_of_others(values):
    expected = [np.median(np.delete(values, rank)) for rank in range(len(values))]
    np.testing.assert_allclose(slowness.median_of_others(values), expected)


@given(MATRICES)
def test_cost_is_what_the_run_would_save(busy):
    wait = busy.max(axis=0) - busy + 0.1
    total = (busy.max(axis=0) + 0.1).sum()
    for rank in range(len(busy)):
        without = np.delete(busy, rank, axis=0).max(axis=0)
        saved = np.maximum(busy.max(axis=0) - without, 0).sum() / total
        assert slowness.cost_of_each(busy, wait)[rank] == pytest.approx(saved, abs=1e-9)
        group = np.arange(len(busy)) == rank
        assert slowness.cost_of_group(busy, wait, group) == pytest.approx(saved, abs=1e-9)


@given(st.integers(2, 64), st.integers(1, 60), st.data())
def test_chance_of_so_many_is_the_binomial_tail(ranks, total, data):
    count = data.draw(st.integers(0, total))
    p = 1 / ranks
    exact = sum(math.comb(total, k) * p**k * (1 - p) ** (total - k) for k in range(count, total + 1))
    assert slowness.chance_of_so_many(count, total, ranks) == pytest.approx(exact, rel=1e-6)


@given(MATRICES)
def test_pauses_are_counted_as_runs_and_never_cost_more_than_the_excess(busy):
    counts, seconds = slowness.pauses(busy)
    assert (counts <= (busy.shape[1] + 1) // 2).all()
    assert (seconds >= 0).all()
    assert (seconds[counts == 0] == 0).all()
    assert seconds.sum() <= (busy.max(axis=0) - np.median(busy, axis=0)).sum() + 1e-9 or len(busy) < 3


@given(MATRICES, st.floats(0.1, 10))
def test_constant_work_explains_nothing(busy, work):
    assert (slowness.work_explains(busy, np.full_like(busy, work)) == 0).all()


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
def test_causes(extra, cause):
    seconds = np.zeros(len(CAUSES))
    for column, value in extra.items():
        seconds[column] = value
    assert cause_of(seconds, NORMAL) == cause


def test_a_phase_that_is_most_of_a_step_is_not_the_cause_if_the_rest_is_slower_too():
    extra, normal = np.zeros((2, len(CAUSES)))
    extra[[Phase.FORWARD, Phase.DATA]], normal[[Phase.FORWARD, Phase.DATA]] = (0.8, 0.2), (0.875, 0.125)
    assert cause_of(extra, normal) == "compute"
    assert cause_of(extra * (np.arange(len(CAUSES)) == Phase.FORWARD), normal) == "forward"


@pytest.mark.parametrize("where", trials.WHERE)
def test_the_replay_tool_finds_a_fifth_everywhere(where):
    cell = trials.run_cell(trials.from_simulation, 8, where, 0.2, trials=10, seed=1)
    assert (cell.right_rank, cell.right_cause, cell.innocents) == (1, 1, 0)
    assert cell.latency_p95 <= 96


def test_the_replay_tool_sees_that_other_quantities_and_rules_fail():
    rows = {row["detector"]: row["found"] for row in trials.compare(trials.from_simulation, 8, 0.2, 3, seed=1)}
    assert rows.pop("hpctrain") == 1
    assert set(rows.values()) == {0}


def test_resampled_traces_keep_a_recorded_rank_s_steps():
    rng = np.random.default_rng(0)
    recorded = traces.simulated(2, 200, rng)
    trial = traces.resampled(recorded, 5, 100, rng)
    assert trial.spent.shape == (5, 100, len(CAUSES))
    np.testing.assert_allclose(np.median(trial.busy()), np.median(recorded.busy()), rtol=0.05)


@pytest.mark.slow
def test_a_window_of_ten_thousand_ranks_takes_little_memory():
    assert trials.cost(10_000, windows=3)["peak_bytes"] < 100 * 2**20


# The same on numbers that are worked out by hand


def alternating(medians: list[float], swing: float, steps: int = 16) -> np.ndarray:
    """[R, S] busy seconds that go up and down by ``swing`` around each rank's median."""
    return np.array(medians)[:, None] + swing * np.tile([1.0, -1.0], steps // 2)


def test_z_is_the_distance_over_the_largest_of_spread_error_and_floor():
    error = math.sqrt(math.pi / 2) * 1.4826 * 0.25 / math.sqrt(16)
    z = slowness.robust_z(np.array([1.0, 1.0, 1.0, 2.0]), alternating([1.0, 1.0, 1.0, 2.0], 0.25))
    assert z == pytest.approx([0, 0, 0, 1 / error], rel=1e-4)
    spread = 1.4826 * 0.5
    medians = [1.0, 1.5, 2.0, 2.5, 5.0]
    between = slowness.robust_z(np.array(medians), alternating(medians, 0.0))
    assert between[-1] == pytest.approx((5 - 1.75) / spread)
    floor = slowness.robust_z(np.array(medians), alternating(medians, 0.0), between=False)
    assert floor[-1] == pytest.approx((5 - 1.75) / (0.01 * 2)), "with few ranks their spread is not asked"


def test_excess_is_a_share_of_the_others_median():
    assert slowness.excess_of_each(np.array([1.0, 1.0, 1.5])).tolist() == [-0.2, -0.2, 0.5]
    assert np.isfinite(slowness.excess_of_each(np.zeros(3))).all()


def test_costs_and_transfer_in_seconds():
    busy = np.array([[1.0, 1.0, 1.0], [1.0, 2.0, 1.0], [1.0, 1.5, 3.0]])
    wait = busy.max(axis=0) - busy + 0.5
    assert slowness.step_seconds(busy, wait) == 7.5 and slowness.transfer_seconds(wait) == 0.5
    assert slowness.cost_of_each(busy, wait) == pytest.approx([0, 0.5 / 7.5, 2 / 7.5])
    assert slowness.cost_of_group(busy, wait, np.array([False, True, True])) == pytest.approx(3 / 7.5)
    assert slowness.cost_of_group(busy, wait, np.ones(3, dtype=bool)) == 0
    assert slowness.uneven_cost(busy, wait) == pytest.approx((0 + 0.5 + 2) / 7.5)


def test_a_pause_is_more_than_half_a_step_too_long_and_slowest_of_all():
    busy = np.ones((3, 8))
    busy[0, 1] = 1.5  # not more than half as long again
    busy[1, 3:5] = 4.0  # two steps in a row are one pause
    busy[2, 4] = 3.0  # not the slowest in that step
    busy[2, 6] = 2.0
    counts, seconds = slowness.pauses(busy)
    assert counts.tolist() == [0, 1, 1] and seconds.tolist() == [0.0, 3.0 + 1.0, 1.0]
    alone, lost = slowness.pauses(np.array([[1.0, 1.0, 3.0, 1.0]]))
    assert alone.tolist() == [1] and lost.tolist() == [2.0]


def test_work_that_varies_explains_what_follows_it():
    work = np.array([[1.0, 2.0, 3.0, 4.0], [4.0, 3.0, 2.0, 1.0]])
    assert slowness.work_explains(0.5 + 0.25 * work, work) == pytest.approx(0.25 * (work - 2.5))
    assert not slowness.work_explains(2.0 - 0.25 * work, work).any(), "less time for more work explains nothing"
    noise = np.array([[1.0, 2.0, 2.0, 1.0], [2.0, 1.0, 1.0, 2.0]])
    assert not slowness.work_explains(noise, work).any()
    a_fifth = np.array([[1.0, 2.0, 1.0, 2.0], [2.0, 1.0, 2.0, 1.0]])
    assert not slowness.work_explains(a_fifth, work).any(), "a line that fits a fifth of the variance is none"
    assert not slowness.work_explains(work, np.zeros_like(work)).any()
    assert not slowness.work_explains(work, np.where(work > 3, np.nan, work)).any()


@pytest.mark.parametrize("unit", [0.125, 1.0, 16.0])
def test_a_pause_does_not_hide_what_work_explains_in_steps_of_any_length(unit):
    work = np.tile([1.0, 2.0, 3.0, 4.0], (2, 8))
    busy = unit * 0.25 * work
    busy[0, 1] += 100 * unit
    explained = slowness.work_explains(busy, work)
    assert explained == pytest.approx(0.25 * unit * (work - 2.5), rel=0.3)


@pytest.mark.parametrize("work", [[[0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]], [[0.0] * 4, [0.0] * 4, [1.0] * 4]])
def test_where_the_typical_step_has_no_work_nothing_is_explained(work):
    assert not slowness.work_explains(0.5 + np.array(work), np.array(work)).any()


def test_work_that_differs_between_ranks_only_excuses_up_to_its_share():
    work = np.repeat([[4.0], [4.0], [6.0]], 4, axis=1)
    explained = slowness.work_explains(np.full((3, 4), 2.0), work)
    assert explained.tolist() == [[0.0] * 4, [0.0] * 4, [1.0] * 4], "half as much again of the median's 2 s"
    one_more = slowness.work_explains(np.full((3, 4), 2.0), work - (work > 4))
    assert one_more.tolist() == [[0.0] * 4, [0.0] * 4, [0.5] * 4]
    nearly = slowness.work_explains(np.full((3, 4), 2.0), work * [1.0, 1.005, 1.0, 1.005])
    assert nearly[2] == pytest.approx(explained[2], rel=0.02), "half a percent from step to step is no variation"
    lazy = slowness.work_explains(np.full((3, 4), 2.0), np.repeat([[4.0], [4.0], [2.0]], 4, axis=1))
    assert not lazy.any(), "less work is no debt"


def test_the_upper_group_is_above_the_widest_gap():
    def upper(*medians):
        return slowness.upper_group(np.array(medians), 0.5).tolist()

    assert upper(1.0, 2.0, 1.0, 2.1) == [False, True, False, True]
    assert upper(1.0, 1.5) == [False, True] and upper(1.0, 1.49) == [False, False]
    assert upper(2.0, 3.5, 1.0) == [True, True, False], "a gap is a share of what lies below it"


def test_chance_in_numbers():
    assert slowness.chance_of_so_many(0, 4, 2) == pytest.approx(1)
    assert slowness.chance_of_so_many(4, 4, 2) == pytest.approx(1 / 16)
    assert slowness.chance_of_so_many(1, 1, 8) == pytest.approx(1 / 8)
