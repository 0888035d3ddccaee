"""From last words to a decision."""

from __future__ import annotations

import dataclasses

import pytest

from hpctrain.errors import ExitCode
from hpctrain.run.last_words import Ending, ErrorWord, LastWord
from hpctrain.run.verdict import Action, Stop, Verdict, blame, decide, trailing_failures

PERSON = Stop("signal SIGINT", by_person=True)
SCHEDULER = Stop("signal SIGUSR1", by_person=False)
ADVANCED = {"attempt": 1, "from_step": 10, "to_step": 20}
STUCK = {"attempt": 1, "from_step": 10, "to_step": 10, "verdict": {"exit_code": 70}}


def word(rank: int, ending: Ending, **fields) -> LastWord:
    return dataclasses.replace(LastWord(rank, f"n{rank}", 100 + rank, 1.0, 0.0, ending, step=7), **fields)


def failed(rank: int, what: str, ended: float, code: ExitCode = ExitCode.FAILURE) -> LastWord:
    return word(rank, Ending.FAILED, ended=ended, exit_code=int(code), error=ErrorWord(what, "fix it", "E", ""))


def both(ending: Ending) -> list[LastWord]:
    return [word(0, ending), word(1, ending)]


@pytest.mark.parametrize(
    ("words", "attempt", "stop", "action", "code"),
    [
        (both(Ending.COMPLETED), ADVANCED, None, Action.DONE, 0),
        (both(Ending.EARLY), ADVANCED, None, Action.DONE, 0),
        (both(Ending.COMPLETED), ADVANCED, SCHEDULER, Action.DONE, 0),
        (both(Ending.STOPPED), ADVANCED, PERSON, Action.STOP, 75),
        (both(Ending.STOPPED), STUCK, PERSON, Action.STOP, 75),
        (both(Ending.STOPPED), ADVANCED, SCHEDULER, Action.REQUEUE, 75),
        (both(Ending.STOPPED), STUCK, SCHEDULER, Action.DO_NOT_REQUEUE, 76),
        ([word(0, Ending.TAKEN_DOWN), failed(1, "x", 1.0)], ADVANCED, None, Action.REQUEUE, 70),
        ([word(0, Ending.TAKEN_DOWN), failed(1, "x", 1.0, ExitCode.USER_ERROR)], ADVANCED, None, Action.FAIL, 64),
        ([failed(0, "x", 1.0, ExitCode.DO_NOT_REQUEUE)], ADVANCED, None, Action.FAIL, 76),
        ([word(0, Ending.TAKEN_DOWN), word(1, Ending.KILLED)], ADVANCED, None, Action.REQUEUE, 70),
        ([word(0, Ending.VANISHED), word(1, Ending.COMPLETED)], ADVANCED, None, Action.REQUEUE, 70),
        ([], ADVANCED, None, Action.REQUEUE, 70),
        ([failed(0, "x", 1.0)], ADVANCED, PERSON, Action.STOP, 70),
    ],
)
def test_what_follows_from_how_ranks_ended(words, attempt, stop, action, code):
    verdict = decide(words, [attempt], max_failures=3, stop=stop)
    assert (verdict.action, verdict.exit_code) == (action, code)


def test_the_earliest_error_is_the_cause():
    verdict = blame([failed(0, "connection lost", 5.0), failed(1, "the data is bad", 4.0)])
    assert verdict.reason == "rank 1 on n1: the data is bad"
    assert (verdict.rank, verdict.host, verdict.fix, verdict.cause) == (1, "n1", "fix it", "error")


def test_a_death_comes_before_the_errors_it_causes():
    words = [failed(0, "connection lost", 5.0), word(1, Ending.KILLED, note="was killed by SIGKILL")]
    assert blame(words).reason == "rank 1 on n1 was killed by SIGKILL"


@pytest.mark.parametrize(
    ("exit_code", "note", "cause"),
    [
        (137, "was killed by SIGKILL", "killed"),
        (3, "exited with code 3", "vanished"),
        (None, "left in mid-run without an error", "vanished"),
    ],
)
def test_a_rank_that_left_by_itself_was_not_killed(exit_code: int | None, note: str, cause: str) -> None:
    assert blame([word(1, Ending.KILLED, note=note, exit_code=exit_code)]).cause == cause


def test_an_error_of_all_ranks_names_none():
    assert blame([failed(0, "no such file", 1.0), failed(1, "no such file", 1.1)]).reason == "no such file"


def test_out_of_memory_has_its_own_advice():
    verdict = blame([word(1, Ending.KILLED, note="was killed by the kernel: out of memory")])
    assert verdict.cause == "out_of_memory"
    assert "memory" in verdict.fix


def test_repeated_failure_ends_the_run():
    words = [word(0, Ending.TAKEN_DOWN), failed(1, "boom", 1.0)]
    assert decide(words, [STUCK, STUCK], max_failures=3).action is Action.REQUEUE
    verdict = decide(words, [STUCK, STUCK, STUCK], max_failures=3)
    assert (verdict.action, verdict.exit_code) == (Action.DO_NOT_REQUEUE, 76)
    assert "3 attempts in a row" in verdict.reason
    assert "boom" in verdict.reason


def test_progress_and_orderly_stops_start_the_count_of_failures_anew():
    stopped = {**STUCK, "verdict": {"exit_code": 75}}
    assert trailing_failures([STUCK, STUCK]) == 2
    assert trailing_failures([STUCK, ADVANCED, STUCK]) == 1
    assert trailing_failures([STUCK, stopped, STUCK]) == 1
    assert trailing_failures([STUCK, ADVANCED]) == 0


def test_lost_nodes_are_not_counted_as_failures_of_the_run():
    lost = {**STUCK, "verdict": {"exit_code": 70, "cause": "node"}}
    assert trailing_failures([STUCK, lost, lost, STUCK]) == 2
    node = Verdict(Action.REQUEUE, ExitCode.FAILURE, "a node was lost", cause="node")
    assert decide([], [STUCK, STUCK, STUCK], max_failures=3, failure=node) == node


def test_an_attempt_that_was_replaced_is_not_run_again_and_not_counted() -> None:
    replaced = {**STUCK, "verdict": {"exit_code": 76, "cause": "replaced"}}
    assert trailing_failures([STUCK, replaced, STUCK]) == 2
    word = failed(0, "attempt 1 has been replaced by attempt 2", 1.0, ExitCode.DO_NOT_REQUEUE)
    assert word.error is not None
    error = dataclasses.replace(word.error, type="Replaced")
    verdict = decide([dataclasses.replace(word, error=error)], [STUCK], max_failures=3)
    assert (verdict.action, verdict.exit_code, verdict.cause) == (Action.DO_NOT_REQUEUE, 76, "replaced")


def test_an_attempt_that_died_with_its_supervisor_came_as_far_as_the_next_one_began():
    died = {"attempt": 1, "from_step": 0}
    assert trailing_failures([died, STUCK]) == 1
    assert trailing_failures([{"attempt": 1, "from_step": 10}, STUCK]) == 2


def test_what_the_supervisor_ended_the_attempt_for_wins():
    hang = Verdict(Action.REQUEUE, ExitCode.FAILURE, "hang", cause="hang")
    assert decide(both(Ending.COMPLETED), [ADVANCED], 3, failure=hang).reason == "hang"


@pytest.mark.parametrize(
    ("stop", "action", "reason"),
    [
        (None, Action.REQUEUE, "asked to be run again"),
        (SCHEDULER, Action.REQUEUE, "stopped by signal SIGUSR1"),
        (PERSON, Action.STOP, "stopped by signal SIGINT"),
    ],
)
def test_of_a_plain_command_no_checkpoint_is_expected(stop: Stop | None, action: Action, reason: str) -> None:
    verdict = decide(both(Ending.STOPPED), [STUCK], max_failures=3, stop=stop, saves=False)
    assert (verdict.action, verdict.exit_code) == (action, 75)
    assert reason in verdict.reason
