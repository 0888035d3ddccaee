"""What ranks agree on that have timed the layers of a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from hpctrain.backends.torch.strategies.pipeline.stage_schedule import LEAST_PASSES, MOST_PASSES, agreed_times
from hpctrain.comm.group import TIMEOUT_S, Group


class Told(Group):
    """A group in which the other ranks say what they are to say, pass after pass."""

    def __init__(self, others: Iterator[Sequence[float] | None]) -> None:
        super().__init__("told")
        self.others = others

    def allgather(self, value: Any, what: str, timeout_s: float = TIMEOUT_S) -> list[Any]:
        return [value, next(self.others)]


def agreed(own: list[list[float] | None], other: list[list[float] | None]) -> tuple[list[float], int]:
    """The times, and the number of passes; each rank says its last word for ever."""
    passes = 0

    def one_pass() -> list[float] | None:
        nonlocal passes
        passes += 1
        return own[min(passes, len(own)) - 1]

    others = (other[min(number, len(other) - 1)] for number in range(100))
    return agreed_times(one_pass, Told(others)), passes


def test_the_fastest_pass_of_each_rank_counts_and_the_first_one_does_not():
    times, passes = agreed([[0.001, 0.001], [2.0, 8.0], [4.0, 6.0]], [[9.0, 9.0], [3.0, 3.0]])
    assert times == [2.5, 4.5]
    assert passes == 1 + LEAST_PASSES, "slow ones are not repeated"


def test_quick_layers_are_timed_more_often():
    times, passes = agreed([[0.001]], [[0.003]])
    assert times == pytest.approx([0.002])
    assert passes == 1 + MOST_PASSES


def test_a_rank_without_samples_takes_part_and_says_nothing():
    assert agreed([None], [[5.0, 2.0]]) == ([5.0, 2.0], 1 + LEAST_PASSES)
    assert agreed([None], [None]) == ([], 1)
