"""Who is said to hang, and when."""

from __future__ import annotations

import pytest

from hpctrain.monitor.chief import sentence
from hpctrain.monitor.chief.hang import (
    ENDED,
    FIRST_STEP_S,
    GONE,
    INSIDE_STEP_S,
    OUTSIDE_STEP_S,
    STOPPED,
    Beat,
    HangWatch,
    who_never_arrived,
)
from hpctrain.train.clock import Phase

BEGIN = -1


def beats(*entries: tuple[int, int, str], age: float = 100.0) -> list[Beat]:
    return [Beat(rank, steps, phase, age, state) for rank, (steps, phase, state) in enumerate(entries)]


@pytest.mark.parametrize(
    ("entries", "culprits"),
    [
        ([(7, Phase.BACKWARD, "S"), (7, Phase.FORWARD, "R"), (7, Phase.BACKWARD, "S")], [1]),
        ([(7, Phase.BACKWARD, "S"), (6, Phase.OPTIMIZER, "R")], [1]),
        ([(7, BEGIN, "S"), (7, Phase.BACKWARD, "R"), (6, Phase.EXCHANGE, "R")], [0, 2]),
        ([(7, Phase.BACKWARD, "S"), (7, Phase.BACKWARD, STOPPED)], [1]),
        ([(7, Phase.BACKWARD, "S"), (7, Phase.FORWARD, "R"), (3, Phase.BACKWARD, GONE)], [2]),
        ([(7, Phase.BACKWARD, "S"), (7, Phase.BACKWARD, ENDED)], [1]),
        ([(7, Phase.BACKWARD, "S"), (7, Phase.BACKWARD, "R")], []),
        ([(7, Phase.OPTIMIZER, "S"), (7, Phase.OPTIMIZER, "R")], []),
        ([(7, Phase.OPTIMIZER, "S"), (6, Phase.OPTIMIZER, "R")], [1]),
    ],
)
def test_those_who_never_arrived(entries: list[tuple[int, int, str]], culprits: list[int]) -> None:
    assert [beat.rank for beat in who_never_arrived(beats(*entries))] == culprits


def test_a_hang_is_told_once_until_the_run_moves_again() -> None:
    watch = HangWatch(hang_s=10)
    waiting = (7, Phase.BACKWARD, "S")
    assert watch.observe(beats(waiting, (7, Phase.FORWARD, "R"), age=9.9)) is None
    hang = watch.observe(beats(waiting, (7, Phase.FORWARD, "R"), age=10.1))
    assert hang is not None
    assert [beat.rank for beat in hang.culprits] == [1]
    assert watch.observe(beats(waiting, (7, Phase.FORWARD, "R"), age=20)) is None
    assert watch.observe(beats(waiting, (8, Phase.FORWARD, "R"), age=0.1)) is None
    assert watch.observe(beats(waiting, (8, Phase.FORWARD, "R"), age=11)) is not None


def test_one_moving_rank_is_movement() -> None:
    moving = [Beat(0, 7, Phase.BACKWARD, 100, "S"), Beat(1, 7, Phase.CALLBACKS, 1, "R")]
    assert HangWatch(hang_s=10).observe(moving) is None


def test_the_first_step_may_take_long() -> None:
    first = (0, Phase.FORWARD, "R")
    assert HangWatch(hang_s=10).observe(beats(first, first, age=FIRST_STEP_S - 1)) is None
    assert HangWatch(hang_s=10).observe(beats(first, first, age=FIRST_STEP_S + 1)) is not None


def test_the_automatic_limit_follows_the_longest_silence() -> None:
    inside, outside = (7, Phase.FORWARD, "R"), (7, Phase.OPTIMIZER, "R")
    watch = HangWatch(None)
    assert watch.limit(beats(inside)) == INSIDE_STEP_S
    assert watch.limit(beats(inside, outside)) == OUTSIDE_STEP_S
    for steps, age in ((3, 1.0), (3, 90.0), (4, 0.5), (5, 0.1)):
        watch.observe(beats((steps, Phase.FORWARD, "R"), age=age))
    assert watch.limit(beats(inside)) == 900


def test_a_death_is_told_at_once_and_once() -> None:
    watch = HangWatch(None)
    group = beats((7, Phase.BACKWARD, "S"), (7, Phase.FORWARD, GONE), age=0.1)
    hang = watch.observe(group)
    assert hang is not None
    assert hang.died
    text = sentence.of_hang(hang, ["n1", "n2"], "abort")
    assert text.startswith("rank 1 on n2 has died without notice after 7 steps")
    assert watch.observe(group) is None


def test_deaths_after_a_good_bye_are_its_consequence() -> None:
    assert HangWatch(None).observe(beats((7, Phase.BACKWARD, ENDED), (7, Phase.FORWARD, GONE), age=0.1)) is None


def test_a_hang_reads_as_one_sentence() -> None:
    watch = HangWatch(hang_s=10)
    hang = watch.observe(beats((7, Phase.BACKWARD, "S"), (7, Phase.FORWARD, STOPPED), (7, Phase.BACKWARD, "S"), age=12))
    assert hang is not None
    assert sentence.of_hang(hang, ["a", "b", "c"], "report") == (
        "no step for 12 s: rank 1 on b is stopped by a signal after 7 steps; 2 ranks wait: only reported"
    )
