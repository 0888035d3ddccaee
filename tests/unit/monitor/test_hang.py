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
from hpctrain.run.grid import Grid
from hpctrain.train.clock import Neighbours, Phase

BEGIN, BETWEEN_BEATS = -1, -2


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
        ([(7, Phase.CALLBACKS, "S"), (7, Phase.OPTIMIZER, "R")], [1]),
    ],
)
def test_those_who_never_arrived(entries, culprits):
    assert [beat.rank for beat in who_never_arrived(beats(*entries))] == culprits


NEAR = Neighbours.TENSOR
GRID = Grid(4, tensor=2)
ARRIVED, IN_A_SUM = (7, Phase.BACKWARD, 0), (7, Phase.TO_DEVICE, NEAR)


@pytest.mark.parametrize(
    ("entries", "culprits"),
    [
        ([ARRIVED, ARRIVED, IN_A_SUM, (7, Phase.TO_DEVICE, 0)], [3]),
        ([ARRIVED, ARRIVED, IN_A_SUM, (7, Phase.FORWARD, 0)], [3]),
        ([IN_A_SUM, (7, BEGIN, 0), ARRIVED, (7, Phase.BACKWARD, NEAR)], [1]),
        ([ARRIVED, ARRIVED, IN_A_SUM, ARRIVED], [3]),
        ([IN_A_SUM, IN_A_SUM, IN_A_SUM, IN_A_SUM], []),
    ],
)
def test_who_waits_for_neighbours_has_not_failed_to_arrive(entries, culprits):
    found = [Beat(rank, steps, phase, 100.0, "S", near) for rank, (steps, phase, near) in enumerate(entries)]
    hang = HangWatch(10, GRID).observe(found)
    assert hang is not None
    assert [beat.rank for beat in hang.culprits] == culprits
    waiting = [beat.doing for beat in found if beat.waits_for]
    assert set(waiting) == {"waits for other parts of a layer"}


def test_places_and_neighbours_are_told():
    found = [Beat(rank, 7, Phase.TO_DEVICE, 100.0, "S", NEAR if rank == 2 else 0) for rank in range(4)]
    found[:2] = [Beat(rank, 7, Phase.BACKWARD, 100.0, "S") for rank in range(2)]
    hang = HangWatch(10, GRID).observe(found)
    assert hang is not None
    said = sentence.of_hang(hang, ["n0", "n0", "n1", "n1"], "report", GRID)
    assert said == (
        "no step for 100 s: rank 3 (data 1, tensor 1) on n1 is past to_device after 7 steps; "
        "3 ranks wait (rank 2 in the middle of a pass): only reported"
    )


def test_if_none_is_to_blame_it_is_told_who_does_what():
    found = [Beat(rank, 7, Phase.BACKWARD, 100.0, "S", 0 if rank < 2 else Neighbours.PIPELINE) for rank in range(4)]
    hang = HangWatch(10, Grid(4, pipeline=2)).observe(found)
    assert hang is not None and not hang.culprits
    assert sentence.of_hang(hang, ["n0"] * 4, "report") == (
        "no step for 100 s: every rank waits in the exchange (ranks 0-1) or waits for another stage (ranks 2-3): "
        "only reported"
    )


def test_a_silence_does_not_raise_its_own_limit_while_it_lasts():
    watch, inside = HangWatch(hang_s=None), (7, Phase.FORWARD, "R")
    assert [watch.observe(beats(inside, age=age)) for age in (1, 40, 80, INSIDE_STEP_S - 1)] == [None] * 4
    assert watch.observe(beats(inside, age=INSIDE_STEP_S + 1)) is not None


def test_a_silence_that_ended_by_itself_raises_the_limit_also_if_two_looks_saw_it_equally_long():
    """As while the run is suspended."""
    watch, inside = HangWatch(hang_s=None), (7, Phase.FORWARD, "R")
    for age in (1, 50, 50):
        assert watch.observe(beats(inside, age=age)) is None
    moved = (8, Phase.FORWARD, "R")
    assert watch.observe(beats(moved, age=0)) is None
    assert watch.observe(beats(moved, age=INSIDE_STEP_S + 1)) is None


def test_a_hang_is_told_once_until_the_run_moves_again():
    watch = HangWatch(hang_s=10)
    waiting = (7, Phase.BACKWARD, "S")
    assert watch.observe(beats(waiting, (7, Phase.FORWARD, "R"), age=9.9)) is None
    hang = watch.observe(beats(waiting, (7, Phase.FORWARD, "R"), age=10.1))
    assert hang is not None
    assert [beat.rank for beat in hang.culprits] == [1]
    assert watch.observe(beats(waiting, (7, Phase.FORWARD, "R"), age=20)) is None
    assert watch.observe(beats(waiting, (8, Phase.FORWARD, "R"), age=0.1)) is None
    assert watch.observe(beats(waiting, (8, Phase.FORWARD, "R"), age=11)) is not None


def test_one_moving_rank_is_movement():
    moving = [Beat(0, 7, Phase.BACKWARD, 100, "S"), Beat(1, 7, Phase.CALLBACKS, 1, "R")]
    assert HangWatch(hang_s=10).observe(moving) is None


def test_the_first_step_may_take_long():
    first = (0, Phase.FORWARD, "R")
    assert HangWatch(hang_s=10).observe(beats(first, first, age=FIRST_STEP_S - 1)) is None
    assert HangWatch(hang_s=10).observe(beats(first, first, age=FIRST_STEP_S + 1)) is not None


def test_the_automatic_limit_follows_the_longest_silence():
    inside, outside = (7, Phase.FORWARD, "R"), (7, Phase.OPTIMIZER, "R")
    watch = HangWatch(None)
    assert watch.limit(beats(inside)) == INSIDE_STEP_S
    assert watch.limit(beats(inside, outside)) == OUTSIDE_STEP_S == 600, "as the page on stragglers says"
    for steps, age in ((3, 1.0), (3, 90.0), (4, 0.5), (5, 0.1)):
        watch.observe(beats((steps, Phase.FORWARD, "R"), age=age))
    assert watch.limit(beats(inside)) == 900


def test_a_death_is_told_at_once_and_once():
    watch = HangWatch(None)
    group = beats((7, Phase.BACKWARD, "S"), (7, Phase.FORWARD, GONE), age=0.1)
    hang = watch.observe(group)
    assert hang is not None
    assert hang.died
    text = sentence.of_hang(hang, ["n1", "n2"], "abort")
    assert text.startswith("rank 1 on n2 has died without notice after 7 steps")
    assert watch.observe(group) is None


def test_deaths_after_a_good_bye_are_its_consequence():
    assert HangWatch(None).observe(beats((7, Phase.BACKWARD, ENDED), (7, Phase.FORWARD, GONE), age=0.1)) is None


def test_a_hang_reads_as_one_sentence():
    watch = HangWatch(hang_s=10)
    hang = watch.observe(beats((7, Phase.BACKWARD, "S"), (7, Phase.FORWARD, STOPPED), (7, Phase.BACKWARD, "S"), age=12))
    assert hang is not None
    assert sentence.of_hang(hang, ["a", "b", "c"], "report") == (
        "no step for 12 s: rank 1 on b is stopped by a signal after 7 steps; 2 ranks wait: only reported"
    )
    hang = HangWatch(10).observe(beats((7, Phase.BACKWARD, "S"), (7, Phase.FORWARD, "R")))
    assert hang is not None
    assert sentence.of_hang(hang, ["a", "b"], "report").endswith("; 1 rank waits: only reported")


@pytest.mark.parametrize(
    ("steps", "phase", "state", "words"),
    [
        (7, Phase.BACKWARD, "S", "waits in the exchange"),
        (7, Phase.BACKWARD, ENDED, "has ended"),
        (7, Phase.FORWARD, "R", "is past forward"),
        (7, BEGIN, "R", "is waiting for data"),
        (7, BETWEEN_BEATS, "R", "is between two heartbeats"),
        (7, len(Phase) - 1, "R", f"is past {list(Phase)[-1].name.lower()}"),
        (7, len(Phase), "R", "is between two phases"),
    ],
)
def test_what_a_rank_does_in_words(steps, phase, state, words):
    assert Beat(0, steps, phase, 1.0, state).doing == words


def test_silence_of_exactly_the_limit_is_a_hang():
    assert HangWatch(hang_s=10).observe(beats((7, Phase.FORWARD, "R"), age=10)) is not None


def test_the_limit_of_the_first_step_is_never_below_the_one_asked_for():
    first, second = beats((0, Phase.FORWARD, "R")), beats((1, Phase.FORWARD, "R"))
    assert FIRST_STEP_S == 15 * 60, "docs: a quarter of an hour"
    assert HangWatch(hang_s=5000).limit(first) == 5000 and HangWatch(hang_s=10).limit(first) == FIRST_STEP_S
    assert HangWatch(hang_s=None).limit(first) == FIRST_STEP_S
    assert HangWatch(hang_s=10).limit(second) == 10 and HangWatch(hang_s=None).limit(second) == INSIDE_STEP_S


def test_silence_before_the_first_finished_step_is_not_learned():
    """Compilation takes minutes once; a limit of ten times that would never be reached."""
    watch = HangWatch(None)
    for steps, age in ((0, 300.0), (1, 0.5), (2, 0.5)):
        watch.observe(beats((steps, Phase.FORWARD, "R"), age=age))
    assert watch.limit(beats((2, Phase.FORWARD, "R"))) == INSIDE_STEP_S


def test_the_second_silence_is_learned_and_the_longest_stays():
    watch = HangWatch(None)
    for steps, age in ((0, 1.0), (1, 70.0), (2, 0.5), (2, 20.0), (3, 0.5), (4, 0.5)):
        watch.observe(beats((steps, Phase.FORWARD, "R"), age=age))
    assert watch.limit(beats((4, Phase.FORWARD, "R"))) == 700


@pytest.mark.parametrize("phase", [Phase.OPTIMIZER, Phase.CALLBACKS, Phase.CHECKPOINT])
def test_hooks_and_checkpoints_may_take_longer_than_computing(phase):
    assert HangWatch(None).limit(beats((7, Phase.FORWARD, "R"), (7, phase, "R"))) == OUTSIDE_STEP_S


def test_a_death_is_as_old_as_the_last_sign_of_the_dead_and_no_hang_follows_it():
    watch = HangWatch(hang_s=10)
    group = [Beat(0, 7, Phase.BACKWARD, 1.0, "S"), Beat(1, 7, Phase.FORWARD, 4.0, GONE), Beat(2, 7, 1, 3.0, GONE)]
    hang = watch.observe(group)
    assert hang is not None
    assert (hang.silence_s, [beat.rank for beat in hang.culprits], [beat.rank for beat in hang.waiting]) == (
        3.0,
        [1, 2],
        [0],
    )
    assert watch.observe([Beat(0, 7, Phase.BACKWARD, 60.0, "S"), *group[1:]]) is None


def test_ranks_that_have_all_said_good_bye_do_not_hang():
    assert HangWatch(hang_s=10).observe(beats((7, Phase.BACKWARD, ENDED), age=100)) is None


def test_who_waits_in_an_earlier_exchange_is_one_of_those_who_never_arrived():
    hang = HangWatch(hang_s=10).observe(beats((8, Phase.BACKWARD, "S"), (7, Phase.BACKWARD, "S"), (8, BEGIN, "S")))
    assert hang is not None and not hang.died
    assert [beat.rank for beat in hang.culprits] == [1, 2] and [beat.rank for beat in hang.waiting] == [0]
