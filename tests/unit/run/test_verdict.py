"""From last words to a decision."""

from __future__ import annotations

import dataclasses

import pytest

from hpctrain.config.sections import ParallelConfig
from hpctrain.errors import Code, ExitCode
from hpctrain.run.attempt_record import Attempt
from hpctrain.run.decision import blame, decide, trailing_failures
from hpctrain.run.last_words import Ending, ErrorWord, LastWord
from hpctrain.run.verdict import Action, Stop, Verdict, failed_with

PERSON = Stop("signal SIGINT", by_person=True)
SCHEDULER = Stop("signal SIGUSR1", by_person=False, code=Code.TIME_LIMIT)
ADVANCED = Attempt(1, from_step=10, to_step=20)
STUCK = Attempt(1, from_step=10, to_step=10, verdict=failed_with(Code.EXCEPTION, "x", ""))


def word(rank: int, ending: Ending, **fields) -> LastWord:
    return dataclasses.replace(LastWord(rank, f"n{rank}", 100 + rank, 1.0, 0.0, ending, step=7), **fields)


def failed(
    rank: int, what: str, ended: float, exit_code: ExitCode = ExitCode.FAILURE, code: Code = Code.EXCEPTION
) -> LastWord:
    error = ErrorWord(what, "fix it", "E", "", code)
    return word(rank, Ending.FAILED, ended=ended, exit_code=int(exit_code), error=error)


def after(code: Code, exit_code: ExitCode = ExitCode.FAILURE) -> Attempt:
    """An attempt that came no further and ended so."""
    return dataclasses.replace(STUCK, verdict=Verdict(Action.REQUEUE, exit_code, "x", code=code))


def both(ending: Ending) -> list[LastWord]:
    return [word(0, ending), word(1, ending)]


@pytest.mark.parametrize(
    ("words", "attempt", "stop", "action", "exit_code", "code"),
    [
        (both(Ending.COMPLETED), ADVANCED, None, Action.DONE, 0, Code.COMPLETED),
        (both(Ending.EARLY), ADVANCED, None, Action.DONE, 0, Code.COMPLETED),
        (both(Ending.COMPLETED), ADVANCED, SCHEDULER, Action.DONE, 0, Code.COMPLETED),
        (both(Ending.STOPPED), ADVANCED, PERSON, Action.STOP, 75, Code.STOPPED),
        (both(Ending.STOPPED), STUCK, PERSON, Action.STOP, 75, Code.STOPPED),
        (both(Ending.STOPPED), ADVANCED, SCHEDULER, Action.REQUEUE, 75, Code.TIME_LIMIT),
        (both(Ending.STOPPED), STUCK, SCHEDULER, Action.DO_NOT_REQUEUE, 76, Code.NO_PROGRESS),
        ([word(0, Ending.TAKEN_DOWN), failed(1, "x", 1.0)], ADVANCED, None, Action.REQUEUE, 70, Code.EXCEPTION),
        ([failed(1, "x", 1.0, ExitCode.USER_ERROR)], ADVANCED, None, Action.FAIL, 64, Code.EXCEPTION),
        ([failed(0, "x", 1.0, ExitCode.DO_NOT_REQUEUE)], ADVANCED, None, Action.FAIL, 76, Code.EXCEPTION),
        ([word(0, Ending.TAKEN_DOWN), word(1, Ending.KILLED)], ADVANCED, None, Action.REQUEUE, 70, Code.VANISHED),
        ([word(0, Ending.VANISHED), word(1, Ending.COMPLETED)], ADVANCED, None, Action.REQUEUE, 70, Code.VANISHED),
        ([], ADVANCED, None, Action.REQUEUE, 70, Code.VANISHED),
        ([failed(0, "x", 1.0)], ADVANCED, PERSON, Action.STOP, 70, Code.EXCEPTION),
    ],
)
def test_what_follows_from_how_ranks_ended(words, attempt, stop, action, exit_code, code):
    verdict = decide(words, [attempt], max_failures=3, stop=stop)
    assert (verdict.action, verdict.exit_code, verdict.code) == (action, exit_code, code)


def test_the_earliest_error_is_the_cause():
    verdict = blame([failed(0, "connection lost", 5.0), failed(1, "the data is bad", 4.0)])
    assert verdict.reason == "rank 1 on n1: the data is bad"
    assert (verdict.rank, verdict.host, verdict.fix, verdict.cause) == (1, "n1", "fix it", "error")


def test_a_death_comes_before_the_errors_it_causes():
    words = [failed(0, "connection lost", 5.0), word(1, Ending.KILLED, note="was killed by SIGKILL")]
    assert blame(words).reason == "rank 1 on n1 was killed by SIGKILL"


@pytest.mark.parametrize("code", [Code.KILLED, Code.VANISHED, Code.OUT_OF_MEMORY])
def test_what_was_found_out_of_a_death_is_the_code_of_the_verdict(code: Code) -> None:
    verdict = blame([word(1, Ending.KILLED, note="whatever it is called, memory or not", code=code)])
    assert (verdict.code, verdict.cause) == (code, code.value)


def test_an_error_of_all_ranks_names_none():
    assert blame([failed(0, "no such file", 1.0), failed(1, "no such file", 1.1)]).reason == "no such file"


def test_out_of_memory_has_its_own_advice():
    verdict = blame([word(1, Ending.KILLED, note="was killed by the kernel", code=Code.OUT_OF_MEMORY)])
    assert "memory" in verdict.fix


def test_repeated_failure_ends_the_run():
    words = [word(0, Ending.TAKEN_DOWN), failed(1, "boom", 1.0)]
    assert decide(words, [STUCK, STUCK], max_failures=3).action is Action.REQUEUE
    verdict = decide(words, [STUCK, STUCK, STUCK], max_failures=3)
    assert (verdict.action, verdict.exit_code) == (Action.DO_NOT_REQUEUE, 76)
    assert "3 attempts in a row" in verdict.reason
    assert "boom" in verdict.reason


def test_progress_and_orderly_stops_start_the_count_of_failures_anew():
    stopped = after(Code.TIME_LIMIT, ExitCode.STOPPED)
    assert trailing_failures([STUCK, STUCK]) == 2
    assert trailing_failures([STUCK, ADVANCED, STUCK]) == 1
    assert trailing_failures([STUCK, stopped, STUCK]) == 1
    assert trailing_failures([STUCK, ADVANCED]) == 0


def test_lost_nodes_are_not_counted_as_failures_of_the_run():
    lost = after(Code.NODE)
    assert trailing_failures([STUCK, lost, lost, STUCK]) == 2
    node = failed_with(Code.NODE, "a node was lost", "")
    assert decide([], [STUCK, STUCK, STUCK], max_failures=3, failure=node) == node


def test_an_attempt_that_was_replaced_is_not_run_again_and_not_counted() -> None:
    assert trailing_failures([STUCK, after(Code.IN_USE), STUCK]) == 2
    word = failed(0, "attempt 1 has been replaced by attempt 2", 1.0, ExitCode.DO_NOT_REQUEUE, Code.IN_USE)
    verdict = decide([word], [STUCK], max_failures=3)
    assert (verdict.action, verdict.exit_code, verdict.cause) == (Action.DO_NOT_REQUEUE, 76, "replaced")


def test_an_attempt_that_died_with_its_supervisor_came_as_far_as_the_next_one_began():
    assert trailing_failures([Attempt(1, from_step=0), STUCK]) == 1
    assert trailing_failures([Attempt(1, from_step=10), STUCK]) == 2
    assert trailing_failures([Attempt(1, from_step=0, ended=5.0), STUCK]) == 2, "its own end tells how far it came"


def test_what_the_supervisor_ended_the_attempt_for_wins():
    hang = failed_with(Code.HANG, "hang", "")
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


@pytest.mark.parametrize(
    ("code", "final"),
    [(Code.EXCEPTION, Code.NO_PROGRESS), (Code.UNKNOWN, Code.NO_PROGRESS), (Code.DISK_FULL, Code.DISK_FULL)],
)
def test_the_code_of_repeated_failures_is_the_precise_one_if_there_is_one(code: Code, final: Code) -> None:
    verdict = decide([failed(1, "boom", 1.0, code=code)], [STUCK] * 3, max_failures=3)
    assert (verdict.action, verdict.code) == (Action.DO_NOT_REQUEUE, final)


@pytest.mark.parametrize("code", Code)
@pytest.mark.parametrize("before_ranks", [False, True])
def test_a_verdict_is_read_as_it_was_written(code: Code, before_ranks: bool) -> None:
    verdict = Verdict(Action.FAIL, ExitCode.USER_ERROR, "a", "b", 1, "n1", code, before_ranks or code is Code.PREFLIGHT)
    assert Verdict.from_json(verdict.to_json()) == verdict


@pytest.mark.parametrize(
    ("cause", "code"),
    [("node", Code.NODE), ("replaced", Code.IN_USE), ("error", Code.UNKNOWN), (None, Code.UNKNOWN)],
)
def test_verdicts_without_codes_tell_what_their_cause_tells(cause: str | None, code: Code) -> None:
    """As an earlier version wrote them: their sentences are not read."""
    saved = {"action": "requeue", "exit_code": 70, "reason": "No space left on device", "cause": cause}
    verdict = Verdict.from_json(saved)
    assert verdict is not None and (verdict.code, verdict.reason) == (code, saved["reason"])


@pytest.mark.parametrize("saved", [{}, {"action": None}, {"action": "of a later version"}])
def test_what_is_no_verdict(saved: dict[str, str | None]) -> None:
    assert Verdict.from_json(saved) is None


def test_an_attempt_is_read_as_it_was_written() -> None:
    attempt = Attempt(3, 1.0, 2.0, 4, 8, "n1", ("n1", "n2"), "7_1", "9", 2, 8, 2, {"numpy": "2"}, "abc", STUCK.verdict)
    assert Attempt.from_json({**attempt.to_json(), "mood": "good"}) == attempt
    assert Attempt.from_json({"attempt": 1, "verdict": None, "hosts": None}) == Attempt(1)


def test_an_orderly_end_says_where_and_whether_it_came_early() -> None:
    assert decide(both(Ending.COMPLETED), [ADVANCED], 3).reason == "done after step 7"
    assert decide(both(Ending.EARLY), [ADVANCED], 3).reason == "stopped early after step 7"
    assert decide(both(Ending.EARLY), [ADVANCED], 3, saves=False).reason == "stopped early"
    uneven = [word(0, Ending.COMPLETED), word(1, Ending.EARLY, step=9)]
    assert decide(uneven, [ADVANCED], 3).reason == "stopped early after step 9"


@pytest.mark.parametrize("step", [0, None])
def test_a_run_that_ended_before_its_first_step_ended_at_step_0(step: int | None) -> None:
    words = [word(rank, Ending.STOPPED, step=step) for rank in range(2)]
    assert decide(words, [ADVANCED], 3, PERSON).reason == "stopped by signal SIGINT at step 0"


def test_a_run_that_saves_nothing_is_started_again_unless_a_person_stopped_it() -> None:
    def verdict(stop: Stop | None) -> tuple[Action, str]:
        decided = decide(both(Ending.STOPPED), [STUCK], 3, stop, saves=False)
        return decided.action, decided.reason

    assert verdict(SCHEDULER) == (Action.REQUEUE, "stopped by signal SIGUSR1")
    assert verdict(None) == (Action.REQUEUE, "asked to be run again (exit code 75)")
    assert verdict(PERSON) == (Action.STOP, "stopped by signal SIGINT at step 7")
    assert decide(both(Ending.STOPPED), [STUCK], 3).action is Action.STOP, "nobody told who asked: nobody goes on"


def test_a_stop_before_any_attempt_is_known_is_no_lack_of_progress() -> None:
    assert decide(both(Ending.STOPPED), [], 3, SCHEDULER).action is Action.REQUEUE


def test_one_failure_that_is_one_too_many_is_told_as_one() -> None:
    verdict = decide([failed(1, "boom", 1.0)], [STUCK], max_failures=1)
    assert verdict.reason == "rank 1 on n1: boom, without a new checkpoint; launch.max_failures is 1"
    assert (verdict.action, verdict.code) == (Action.DO_NOT_REQUEUE, Code.NO_PROGRESS)
    death = [word(1, Ending.KILLED, code=Code.OUT_OF_MEMORY)]
    assert decide(death, [STUCK], max_failures=1).code is Code.OUT_OF_MEMORY, "the cause says more than that"


def test_what_the_supervisor_found_out_counts_whatever_the_ranks_say() -> None:
    hang = failed_with(Code.HANG, "no rank moved", "")
    assert decide(both(Ending.COMPLETED), [ADVANCED], 3, failure=hang) == hang


def test_ranks_without_a_word_are_named_up_to_eight() -> None:
    one = blame([word(2, Ending.VANISHED, note="its node is gone"), word(0, Ending.COMPLETED)])
    assert (one.reason, one.rank, one.host) == ("rank 2 ended without a word (its node is gone)", 2, "n2")
    many = blame([word(rank, Ending.VANISHED) for rank in range(10)])
    assert (many.reason, many.rank) == ("ranks 0, 1, 2, 3, 4, 5, 6, 7 ended without a word", 0)
    first = blame([word(0, Ending.VANISHED, note="its node is gone"), word(1, Ending.VANISHED)])
    assert first.reason == "ranks 0, 1 ended without a word (its node is gone)", (
        "what is known of the one that is blamed"
    )
    unnumbered = blame([dataclasses.replace(word(0, Ending.VANISHED), rank=None)])
    assert unnumbered.reason == "rank ? ended without a word"


def test_an_error_of_some_ranks_names_the_first_and_one_alone_too() -> None:
    assert blame([failed(0, "no such file", 1.0)]).reason == "rank 0 on n0: no such file"
    several = [failed(0, "lost", 2.0), failed(1, "lost", 3.0), failed(2, "no such file", 1.0)]
    assert blame(several).reason == "rank 2 on n2: no such file"


def test_a_death_without_a_note_is_a_death() -> None:
    assert blame([word(1, Ending.KILLED)]).reason == "rank 1 on n1 died"
    assert blame([word(1, Ending.KILLED)]).fix == "see the rank's log"


def test_an_attempt_killed_with_its_supervisor_came_as_far_as_the_next_one_began() -> None:
    killed, next_one = Attempt(1, from_step=10), Attempt(2, from_step=20, to_step=20, verdict=STUCK.verdict)
    assert trailing_failures([killed, next_one]) == 1, "it had saved step 20"
    again = dataclasses.replace(next_one, from_step=10, to_step=10)
    assert trailing_failures([killed, again]) == 2


def test_ranks_that_share_out_a_model_are_told_with_their_places() -> None:
    attempt = dataclasses.replace(STUCK, ranks=4, tensor=2, verdict=None)
    found = [
        decide(words, [attempt], max_failures=3).reason
        for words in (
            [failed(3, "boom", 1.0)],
            [word(2, Ending.KILLED, note="was killed by SIGKILL")],
            [word(rank, Ending.VANISHED) for rank in (1, 9)],
        )
    ]
    assert found == [
        "rank 3 (data 1, tensor 1) on n3: boom",
        "rank 2 (data 1, tensor 0) on n2 was killed by SIGKILL",
        "ranks 1 (data 0, tensor 1), 9 ended without a word",
    ]


@pytest.mark.parametrize(
    ("parallel", "plan"),
    [
        (ParallelConfig(), ""),
        (ParallelConfig(tensor=2), "tensor 2 x data 2"),
        (ParallelConfig(shard="optimizer"), "shard optimizer"),
    ],
)
def test_the_plan_of_an_attempt_is_kept(parallel: ParallelConfig, plan: str) -> None:
    attempt = Attempt(1, ranks=4).under(parallel)
    saved = attempt.to_json()
    assert Attempt.from_json(saved).plan == plan
    assert {"tensor", "shard"} & saved.keys() == {word.split()[0] for word in plan.split(", ") if word}
