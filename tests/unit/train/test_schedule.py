"""Learning-rate schedules against values worked out by hand."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.config.sections import Config, ScheduleConfig, TrainConfig
from hpctrain.errors import UserError
from hpctrain.train.schedule import (
    OwnRates,
    first_factor,
    in_cycle,
    make_schedule,
    sound_factors,
    validation_batch,
    warm_up,
)


def factors(config: ScheduleConfig, ranks: int = 1, steps: int = 100, batch: int = 32, epoch: int = 10) -> list[float]:
    schedule = make_schedule(config, batch * ranks, ranks, steps, epoch)
    return [schedule(step) for step in range(steps + 1)]


@pytest.mark.parametrize("given", [1, 0.5, [0.5, 1.0], OwnRates(float("nan"))])
def test_factors_that_are_numbers_pass(given):
    assert sound_factors(given, 3) is given  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [math.nan, math.inf, [1.0, math.nan], "fast", None, ["a"]])
def test_other_factors_are_refused_before_they_reach_the_weights(given):
    with pytest.raises(UserError, match="after 3 updates"):
        sound_factors(given, 3)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["constant", "plateau"])
def test_what_falls_by_itself_never_is_one_everywhere(kind):
    assert factors(ScheduleConfig(kind=kind)) == [1.0] * 101  # type: ignore[arg-type]


@pytest.mark.parametrize(("scaling", "peak"), [("none", 1.0), ("linear", 8.0), ("sqrt", math.sqrt(8))])
def test_scaling_with_ranks(scaling, peak):
    assert factors(ScheduleConfig(scaling=scaling), ranks=8)[50] == pytest.approx(peak)  # type: ignore[arg-type]


def test_base_batch_takes_the_place_of_one_ranks_batch():
    assert factors(ScheduleConfig(scaling="linear", base_batch=64), ranks=8)[50] == pytest.approx(32 * 8 / 64)


def test_gradual_warm_up_climbs_from_the_unscaled_rate_to_the_scaled_one():
    got = factors(ScheduleConfig(scaling="linear", warmup_epochs=2), ranks=8)
    assert got[0] == pytest.approx(1 + 7 / 20)
    assert got[19] == pytest.approx(8)
    assert got[20] == got[99] == pytest.approx(8)
    steps = [after - before for before, after in itertools.pairwise(got[:20])]
    assert steps == pytest.approx([7 / 20] * 19)


def test_warm_up_without_scaling_starts_near_zero():
    assert factors(ScheduleConfig(warmup_steps=4))[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


@pytest.mark.parametrize(
    ("kind", "middle"),
    [("linear", 0.1 + 0.9 * 0.5), ("cosine", 0.1 + 0.9 * 0.5), ("polynomial", 0.1 + 0.9 * 0.25)],
)
def test_decays_end_at_the_final_factor(kind, middle):
    got = factors(ScheduleConfig(kind=kind, final_factor=0.1))  # type: ignore[arg-type]
    assert (got[0], got[50], got[100]) == pytest.approx((1.0, middle, 0.1))
    assert all(after <= before for before, after in itertools.pairwise(got))


def test_decay_begins_after_the_warm_up():
    got = factors(ScheduleConfig(kind="linear", warmup_steps=20))
    assert got[20] == pytest.approx(1.0)
    assert got[60] == pytest.approx(0.5)


def test_steps_drop_at_their_epochs():
    got = factors(ScheduleConfig(kind="step", step_epochs=(3, 6), step_factor=0.1))
    assert (got[29], got[30], got[59], got[60]) == pytest.approx((1.0, 0.1, 0.1, 0.01))


def test_exponential_multiplies_by_its_factor_each_epoch():
    got = factors(ScheduleConfig(kind="exponential", decay_factor=0.5, warmup_steps=5))
    assert (got[5], got[15], got[25]) == pytest.approx((1.0, 0.5, 0.25))
    assert got[10] == pytest.approx(math.sqrt(0.5))


def test_restarts_fall_as_cosines_of_growing_length():
    got = factors(ScheduleConfig(kind="restarts", cycle_epochs=1, cycle_growth=2, final_factor=0.1))
    assert [step for step in range(100) if got[step] == pytest.approx(1.0)] == [0, 10, 30, 70]
    assert (got[5], got[20], got[50]) == pytest.approx((0.55, 0.55, 0.55))
    equal = factors(ScheduleConfig(kind="restarts", cycle_epochs=2))
    assert equal[:20] == pytest.approx(equal[20:40]) and equal[:20] == pytest.approx(equal[40:60])


def test_one_cycle_climbs_and_falls_within_the_run():
    got = factors(ScheduleConfig(kind="one_cycle", final_factor=0.001))
    assert (got[0], got[15], got[30], got[65], got[100]) == pytest.approx((0.04, 0.52, 1.0, 0.5005, 0.001))


def test_wsd_stays_up_until_its_last_part():
    got = factors(ScheduleConfig(kind="wsd", warmup_steps=10, decay_share=0.2, final_factor=0.1))
    assert got[4] == pytest.approx(0.5) and got[10:81] == [1.0] * 71
    assert (got[90], got[100]) == pytest.approx((0.55, 0.1))


@given(
    st.sampled_from(["constant", "linear", "cosine", "polynomial", "exponential", "wsd", "restarts"]),
    st.integers(0, 50),
    st.integers(1, 64),
)
def test_never_negative_nor_above_the_peak(kind, warmup, ranks):
    config = ScheduleConfig(kind=kind, scaling="linear", warmup_steps=warmup, cycle_epochs=1.5)  # type: ignore[arg-type]
    assert all(0 <= factor <= ranks + 1e-9 for factor in factors(config, ranks=ranks))


def test_step_needs_epochs_and_only_one_warm_up():
    with pytest.raises(UserError, match="step_epochs"):
        ScheduleConfig(kind="step")
    with pytest.raises(UserError, match="warmup"):
        both = ScheduleConfig(warmup_steps=3, warmup_epochs=1)
        Config("run", "a:b", TrainConfig(steps=9, global_batch=1), schedule=both)
    with pytest.raises(UserError, match="cycle_epochs"):
        ScheduleConfig(kind="restarts")
    with pytest.raises(UserError, match="one_cycle, which includes a climb"):
        climbing = ScheduleConfig(kind="one_cycle", warmup_steps=3)
        Config("run", "a:b", TrainConfig(steps=9, global_batch=1), schedule=climbing)


@pytest.mark.parametrize("kind", ["linear", "cosine", "polynomial", "wsd", "one_cycle"])
def test_after_the_last_step_the_factor_stays_where_it_ended(kind):
    """A run that is resumed beyond the steps that it was planned for does not climb again."""
    schedule = make_schedule(ScheduleConfig(kind=kind, final_factor=0.25), 32, 1, 10, 5)  # type: ignore[arg-type]
    assert [schedule(step) for step in (10, 11, 15, 20)] == pytest.approx([0.25] * 4)


def test_a_decay_over_one_step_is_done_after_it():
    for kind in ("linear", "cosine", "polynomial", "wsd"):
        config = ScheduleConfig(kind=kind, final_factor=0.5, warmup_steps=4, decay_share=0.5)  # type: ignore[arg-type]
        got = factors(config, steps=5)
        assert (got[4], got[5]) == (1.0, 0.5), kind
    got = factors(ScheduleConfig(kind="wsd", final_factor=0.5, decay_share=0.1), steps=5)
    assert (got[4], got[5]) == (1.0, 0.5), "never over less than a step"
    got = factors(ScheduleConfig(kind="one_cycle", climb_share=0.8, final_factor=0.5), steps=5)
    assert (got[4], got[5]) == (1.0, 0.5)


def test_a_decay_longer_than_what_follows_the_warm_up_is_as_long_as_that():
    got = factors(ScheduleConfig(kind="wsd", warmup_steps=60, decay_share=0.5, final_factor=0.0))
    assert (got[60], got[80], got[100]) == pytest.approx((1.0, 0.5, 0.0))


def test_a_warm_up_as_long_as_the_run_leaves_no_decay_to_divide_by():
    for kind in ("linear", "cosine", "polynomial", "wsd"):
        got = factors(ScheduleConfig(kind=kind, warmup_steps=10), steps=10)  # type: ignore[arg-type]
        assert got[9] == 1.0, kind


def test_the_first_of_several_factors_stands_for_them_in_reports():
    assert first_factor(0.5) == 0.5
    assert first_factor((0.25, 0.5)) == 0.25
    assert first_factor(OwnRates(0.125)) == 0.125


def test_in_a_cycle_of_another_length_the_share_begins_at_zero_again():
    assert [in_cycle(position, 4, 2) for position in (0, 3, 4, 8, 12, 20)] == [0, 0.75, 0, 0.5, 0, 0.5]
    assert [in_cycle(position, 4, 1) for position in (0, 3, 4, 8, 9)] == [0, 0.75, 0, 0, 0.25]


def test_a_warm_up_for_a_smaller_batch_starts_at_zero():
    """Where the rate is not scaled up there is nothing to climb from."""
    assert warm_up(0, 4, 1.0) == 0.25 and warm_up(0, 4, 0.5) == 0.125
    assert warm_up(0, 4, 2.0) == 1.25 and warm_up(3, 4, 2.0) == 2.0


def test_a_validation_batch_is_as_large_as_a_micro_batch():
    assert validation_batch(TrainConfig(steps=1, global_batch=24, accumulate=2), groups=3) == 4
    assert validation_batch(TrainConfig(steps=1, global_batch=25, accumulate=2), groups=3) == 5, "rounded up"
