"""When checkpoints are due, and which are kept."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.checkpoint.policy import (
    LONGEST_RETRY_S,
    RETRY_S,
    Cost,
    Policy,
    Retention,
    automatic_interval_s,
    daly_s,
    mtbf_s,
    policy_of,
    policy_of_tier,
)
from hpctrain.config.sections import CheckpointConfig, RunDirTierConfig, TiersConfig
from hpctrain.errors import Code, ExitCode, UserError
from hpctrain.run.attempts import Attempt
from hpctrain.run.verdict import failed_with


def test_positions():
    policy = Policy(every_steps=10, every_epochs=2)
    assert policy.due_at(20, 1, at_epoch_end=False)
    assert policy.due_at(33, 4, at_epoch_end=True)
    assert not policy.due_at(33, 3, at_epoch_end=True)
    assert not policy.due_at(33, 4, at_epoch_end=False)


def test_the_clock_counts_only_where_asked():
    assert Policy(every_steps=5).interval_s(None) == math.inf
    assert Policy(every_s=120).interval_s(Cost(1, 1)) == 120
    assert Policy(mtbf_s=3600).interval_s(None) == 60, "the first one, which measures what one costs"


def test_automatic_only_where_nothing_else_is_given():
    assert policy_of(CheckpointConfig()).mtbf_s == 24 * 3600
    assert policy_of(CheckpointConfig(every_steps=5)).mtbf_s is None
    assert policy_of(CheckpointConfig(every_epochs=2)).mtbf_s is None
    assert policy_of(CheckpointConfig(interval="none")) == Policy()
    assert policy_of(CheckpointConfig(every_minutes=2)).every_s == 120


def test_the_run_folder_is_a_tier_with_an_interval():
    tiers = {steps: TiersConfig(run_dir=RunDirTierConfig(steps)) for steps in (7, "auto")}
    assert policy_of(CheckpointConfig(tiers=tiers[7])) == policy_of(CheckpointConfig(every_steps=7))
    automatic = CheckpointConfig(tiers=tiers["auto"], interval="none")
    assert policy_of(automatic) == policy_of(CheckpointConfig())
    assert policy_of_tier(None, automatic) is None
    with pytest.raises(UserError, match="are both given"):
        CheckpointConfig(tiers=tiers[7], every_minutes=3)


def test_failures_of_the_run_bring_checkpoints_closer():
    hour, failed = 3600.0, failed_with(Code.KILLED, "rank 1 was killed", "")
    stopped = replace(failed, exit_code=ExitCode.STOPPED)
    config = CheckpointConfig(mtbf_hours=24)
    assert mtbf_s(config, []) == 24 * hour
    lost = [Attempt(started=at * hour, ended=(at + 2) * hour, verdict=failed) for at in range(2, 82, 2)]
    assert mtbf_s(config, lost) == pytest.approx(2 * hour, rel=0.3)
    quiet = Attempt(started=hour, ended=101 * hour, verdict=stopped)
    assert mtbf_s(config, [quiet]) == 124 * hour
    assert mtbf_s(config, [Attempt(started=hour), quiet]) == 124 * hour, "one that runs, or nobody saw the end of"
    assert mtbf_s(config, [Attempt(started=hour, verdict=stopped), quiet]) == 124 * hour, "its length is unknown"
    assert policy_of_tier("auto", config, lost) == Policy(mtbf_s=mtbf_s(config, lost))


def test_daly_against_young():
    """For cheap checkpoints Young's first-order interval, sqrt(2 C M)."""
    assert daly_s(1, 1e6) == pytest.approx(math.sqrt(2e6), rel=2e-3)
    assert daly_s(300, 100) == 100


@given(st.floats(1e-3, 1e3), st.floats(60, 1e7))
def test_daly_wastes_no_more_than_its_neighbours(stall_s, mtbf_s):
    """Expected run time per useful second (Daly 2006, eq. 20, no restart cost) has its least near the interval."""

    def waste(interval):
        return math.expm1((interval + stall_s) / mtbf_s) * mtbf_s / interval

    interval = daly_s(stall_s, mtbf_s)
    if stall_s < mtbf_s / 10:
        assert waste(interval) <= min(waste(interval * 1.3), waste(interval / 1.3)) * (1 + 1e-6)


@given(st.floats(0, 1e3), st.floats(0, 1e4), st.floats(60, 1e7), st.floats(0.001, 0.5))
def test_automatic_keeps_to_the_budget(stall_s, write_s, mtbf_s, budget):
    interval = automatic_interval_s(Cost(stall_s, write_s), mtbf_s, budget)
    assert stall_s <= budget * interval * (1 + 1e-9)
    assert interval >= 2 * write_s


@given(
    st.sets(st.integers(0, 200), min_size=1),
    st.sets(st.integers(0, 200), max_size=3),
    st.integers(1, 5),
    st.none() | st.integers(1, 20),
)
def test_retention(steps, protected, last, every):
    removed = Retention(last, every).removable(steps, protected)
    kept = steps - set(removed)
    assert set(removed) <= steps and removed == sorted(removed)
    assert set(sorted(steps)[-last:]) <= kept
    assert protected & steps <= kept
    assert all(not every or step % every for step in removed)
    assert not Retention().removable(steps, protected)


def test_the_first_save_at_or_after_each_multiple_is_kept():
    """Saves by the clock hardly ever meet a multiple; they are removed one by one, as a run goes on."""
    steps: list[int] = []
    for step in range(37, 11_000, 70):
        steps.append(step)
        removed = Retention(last=2, every_steps=1000).removable(steps, ())
        steps = [step for step in steps if step not in removed]
    milestones = [next(step for step in range(37, 11_000, 70) if step >= 1000 * count) for count in range(1, 11)]
    assert steps[:-2] == milestones


@given(st.integers(0, 10**6), st.floats(0, 100))
def test_what_failed_is_tried_again_soon_and_within_the_budget(failures, stall_s):
    wait_s = Policy().retry_s(failures + 1, stall_s)
    assert RETRY_S <= wait_s <= max(LONGEST_RETRY_S, stall_s / Policy().overhead_budget)
    assert stall_s <= Policy().overhead_budget * wait_s * (1 + 1e-9)


def test_keeping_none_is_refused():
    with pytest.raises(UserError):
        Retention(last=0)


def test_each_failed_save_doubles_the_wait_up_to_two_minutes():
    waits = [Policy().retry_s(failures, stall_s=0.0) for failures in range(1, 8)]
    assert waits == [10, 20, 40, 80, 120, 120, 120]
    assert Policy(overhead_budget=0.05).retry_s(1, stall_s=10.0) == 200, "a retry stalls as well"


def test_no_rule_makes_nothing_due_and_the_first_step_is_no_multiple_by_itself():
    assert not Policy().due_at(20, 1, at_epoch_end=True)
    assert not Policy(every_steps=10).due_at(21, 1, at_epoch_end=True)
    assert not Policy(every_epochs=2).due_at(21, 1, at_epoch_end=True)


def test_daly_in_numbers():
    """A stall of a fiftieth of the time between failures: eq. 37 term by term."""
    assert daly_s(2.0, 100.0) == pytest.approx(20 * (1 + 0.1 / 3 + 0.01 / 9) - 2)
    assert daly_s(199.9, 100.0) != 100.0 and daly_s(200.0, 100.0) == 100.0


def test_the_automatic_interval_is_the_longest_of_its_reasons():
    cheap, slow_disk, costly = Cost(1e-6, 0.0), Cost(1e-6, 1000.0), Cost(10.0, 1.0)
    assert automatic_interval_s(cheap, 60, 0.05) == 10
    assert automatic_interval_s(slow_disk, 60, 0.05) == 2000
    assert automatic_interval_s(costly, 60, 0.05) == 200
    assert Policy(every_s=50, mtbf_s=60, overhead_budget=0.05).interval_s(costly) == 50
    assert Policy(every_s=500, mtbf_s=60, overhead_budget=0.05).interval_s(costly) == 200


def test_one_kept_checkpoint_is_the_newest():
    assert Retention(last=1).removable([30, 10, 20], protected=()) == [10, 20]
    assert Retention(last=1).removable([30, 10, 20], protected=[10]) == [20]
    with pytest.raises(UserError):
        Retention(every_steps=0)


def test_of_multiple_zero_only_step_zero_itself_is_kept():
    assert Retention(last=1, every_steps=10).milestones([0, 3, 10]) == {0, 10}
    assert Retention(last=1, every_steps=10).milestones([3, 7, 12, 14, 20]) == {12, 20}
