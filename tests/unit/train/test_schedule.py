"""Learning-rate schedules against values worked out by hand."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.config.sections import ScheduleConfig
from hpctrain.errors import UserError
from hpctrain.train.schedule import make_schedule


def factors(config: ScheduleConfig, ranks: int = 1, steps: int = 100, batch: int = 32, epoch: int = 10) -> list[float]:
    schedule = make_schedule(config, batch * ranks, ranks, steps, epoch)
    return [schedule(step) for step in range(steps + 1)]


def test_constant_is_one_everywhere() -> None:
    assert factors(ScheduleConfig()) == [1.0] * 101


@pytest.mark.parametrize(("scaling", "peak"), [("none", 1.0), ("linear", 8.0), ("sqrt", math.sqrt(8))])
def test_scaling_with_ranks(scaling: str, peak: float) -> None:
    assert factors(ScheduleConfig(scaling=scaling), ranks=8)[50] == pytest.approx(peak)  # type: ignore[arg-type]


def test_base_batch_takes_the_place_of_one_ranks_batch() -> None:
    assert factors(ScheduleConfig(scaling="linear", base_batch=64), ranks=8)[50] == pytest.approx(32 * 8 / 64)


def test_gradual_warm_up_climbs_from_the_unscaled_rate_to_the_scaled_one() -> None:
    got = factors(ScheduleConfig(scaling="linear", warmup_epochs=2), ranks=8)
    assert got[0] == pytest.approx(1 + 7 / 20)
    assert got[19] == pytest.approx(8)
    assert got[20] == got[99] == pytest.approx(8)
    steps = [after - before for before, after in itertools.pairwise(got[:20])]
    assert steps == pytest.approx([7 / 20] * 19)


def test_warm_up_without_scaling_starts_near_zero() -> None:
    assert factors(ScheduleConfig(warmup_steps=4))[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


@pytest.mark.parametrize(
    ("kind", "middle"),
    [("linear", 0.1 + 0.9 * 0.5), ("cosine", 0.1 + 0.9 * 0.5), ("polynomial", 0.1 + 0.9 * 0.25)],
)
def test_decays_end_at_the_final_factor(kind: str, middle: float) -> None:
    got = factors(ScheduleConfig(kind=kind, final_factor=0.1))  # type: ignore[arg-type]
    assert (got[0], got[50], got[100]) == pytest.approx((1.0, middle, 0.1))
    assert all(after <= before for before, after in itertools.pairwise(got))


def test_decay_begins_after_the_warm_up() -> None:
    got = factors(ScheduleConfig(kind="linear", warmup_steps=20))
    assert got[20] == pytest.approx(1.0)
    assert got[60] == pytest.approx(0.5)


def test_steps_drop_at_their_epochs() -> None:
    got = factors(ScheduleConfig(kind="step", step_epochs=(3, 6), step_factor=0.1))
    assert (got[29], got[30], got[59], got[60]) == pytest.approx((1.0, 0.1, 0.1, 0.01))


@given(st.sampled_from(["constant", "linear", "cosine", "polynomial"]), st.integers(0, 50), st.integers(1, 64))
def test_never_negative_nor_above_the_peak(kind: str, warmup: int, ranks: int) -> None:
    config = ScheduleConfig(kind=kind, scaling="linear", warmup_steps=warmup)  # type: ignore[arg-type]
    assert all(0 <= factor <= ranks + 1e-9 for factor in factors(config, ranks=ranks))


def test_step_needs_epochs_and_only_one_warm_up() -> None:
    with pytest.raises(UserError, match="step_epochs"):
        ScheduleConfig(kind="step")
    with pytest.raises(UserError, match="warmup"):
        ScheduleConfig(warmup_steps=3, warmup_epochs=1)
