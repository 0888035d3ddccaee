"""The numbers that travel with the gradients."""

from __future__ import annotations

import math

from hpctrain.reduce.flat_layout import LOSS, SLOTS, WEIGHT, WEIGHTED, read_slots


def slots(loss: float, weight: float = 0.0, weighted: float = 0.0) -> list[float]:
    made = [0.0] * SLOTS
    made[LOSS], made[WEIGHT], made[WEIGHTED] = loss, weight, weighted
    return made


def test_a_mean_loss_needs_no_division():
    found = read_slots(slots(0.7))
    assert (found.loss, found.divisor) == (0.7, 1.0)


def test_a_weighted_loss_is_divided_by_all_weights():
    found = read_slots(slots(3.0, weight=4.0, weighted=2.0))
    assert (found.loss, found.divisor) == (0.75, 4.0)


def test_weights_of_zero_leave_zero_gradients_alone():
    assert read_slots(slots(0.0, weight=0.0, weighted=2.0)).divisor == 1.0


def test_one_rank_that_is_not_finite_is_seen_in_the_sum():
    assert math.isnan(read_slots(slots(1.0 + math.nan)).loss)
