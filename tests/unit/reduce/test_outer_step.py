"""Outer steps: averaging and Nesterov's momentum, at once or a round later, with equal outer weights on all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hpctrain.backends.local_training import HostFlatWeights
from hpctrain.reduce.outer_step import OuterStep
from tests.support.thread_groups import ThreadGroup, in_threads

BEGIN = np.array([1.0, -2.0, 0.5])
RANKS, ROUNDS = 3, 5


def progress_of(rank: int, number: int) -> NDArray[Any]:
    """What a rank learns in a round, wherever it begins."""
    return np.random.default_rng([rank, number]).normal(size=3)


def trained(rate: float, momentum: float, parts: int = 0, resumed: int | None = None) -> list[list[NDArray[Any]]]:
    """The outer weights of each rank after each round, or exchange; if asked for, in another object from one on."""

    def work(group: ThreadGroup) -> list[NDArray[Any]]:
        sums = HostFlatWeights(group, BEGIN.copy, lambda _: None)
        outer = OuterStep(sums, BEGIN.copy(), rate, momentum, parts)
        weights, found = BEGIN.copy(), []
        for number in range(ROUNDS):
            if number == resumed:
                outer.settle()
                old, outer = outer, OuterStep(sums, np.zeros(3), rate, momentum, parts)
                for name in ("outer", "velocity", "ahead", "coming", "under_way"):
                    getattr(outer, name)[:] = getattr(old, name)
            weights = weights + progress_of(group.rank, number)
            if parts:
                at = outer.part
                weights[at] = outer.land(weights[at])
            if not parts or number == ROUNDS - 1:
                weights = outer.end_round(weights).copy()
            else:
                outer.leave(weights[outer.next_part])
            found.append(outer.outer.copy())
        np.testing.assert_array_equal(weights, found[-1])
        return found

    return in_threads(RANKS, work)


def mean_progress(number: int) -> NDArray[Any]:
    """Of all ranks."""
    return np.asarray(np.mean([progress_of(rank, number) for rank in range(RANKS)], axis=0))


def by_formula(rate: float, momentum: float) -> list[NDArray[Any]]:
    """Of SGD as PyTorch writes it, on the mean progress."""
    weights, velocity, found = BEGIN.copy(), np.zeros(3), []
    for number in range(ROUNDS):
        gradient = -mean_progress(number)
        velocity = momentum * velocity + gradient
        weights = weights - rate * (gradient + momentum * velocity)
        found.append(weights)
    return found


@pytest.mark.parametrize(("rate", "momentum"), [(1.0, 0.0), (0.7, 0.9)])
def test_steps_are_those_of_nesterov_along_the_mean_progress(rate, momentum):
    for found in trained(rate, momentum):
        np.testing.assert_allclose(found, by_formula(rate, momentum), rtol=1e-12)


@pytest.mark.parametrize(("rate", "momentum"), [(1.0, 0.0), (0.7, 0.9)])
def test_with_overlap_the_same_steps_are_made_a_round_later(rate, momentum):
    """And at the end of a run everything has landed. That progress depends on where it begins is left out here."""
    wanted = [BEGIN, *by_formula(rate, momentum)]
    for found in trained(rate, momentum, parts=1):
        np.testing.assert_allclose(found, [*wanted[: ROUNDS - 1], wanted[ROUNDS]], rtol=1e-12)


def test_parts_take_turns_and_no_progress_is_lost_or_counted_twice():
    """Each number is a part of its own, and means of what all ranks have made since its last turn land a turn later."""
    made = np.cumsum([mean_progress(number) for number in range(ROUNDS)], axis=0)
    for found in trained(1.0, 0.0, parts=3):
        for turn, weights in enumerate(found[:-1]):
            for part in range(3):
                landed = [sent for sent in range(part, turn, 3)]
                np.testing.assert_allclose(weights[part], BEGIN[part] + (made[landed[-1], part] if landed else 0.0))
        np.testing.assert_allclose(found[-1], BEGIN + made[-1])


@pytest.mark.parametrize("parts", [0, 1, 2])
@pytest.mark.parametrize("resumed", [1, 3])
def test_state_resumes_bit_for_bit_with_equal_outer_weights(parts, resumed):
    straight, again = trained(0.7, 0.9, parts), trained(0.7, 0.9, parts, resumed)
    for rank in range(RANKS):
        np.testing.assert_array_equal(again[rank], straight[rank])
        np.testing.assert_array_equal(straight[rank], straight[0])
