"""From last words to a decision."""

from __future__ import annotations

import dataclasses
import signal

import pytest

from hpctrain.config.sections import ParallelConfig
from hpctrain.errors import Code, ExitCode
from hpctrain.programs.plain_command import ending
from hpctrain.run.attempts import Attempt
from hpctrain.run.decision import blame, decide, starts_again, trailing_failures
from hpctrain.run.grid import Grid
from hpctrain.run.last_words import Ending, ErrorWord, LastWord
from hpctrain.run.verdict import Action, RunVerdict, Stop, failed_with

PERSON = Stop("signal SIGINT", by_person=True)
SCHEDULER = Stop("signal SIGUSR1", by_person=False, code=Code.TIME_LIMIT)
ADVANCED = Attempt(1, from_step=10, to_step=20)
UNREPORTED = Attempt(1)
"""An attempt of a program that does not call checkpoint_saved."""
STUCK = Attempt(1, from_step=10, to_step=10, verdict=failed_with(Code.EXCEPTION, "x", ""))


def word(rank: int, ending: Ending, **fields) -> LastWord:
    return dataclasses.replace(LastWord(rank, f"n{rank}", 100 + rank, 1.0, 0.0, ending, step=7), **fields)


def failed(
    rank: int, what: str, ended: float | None, exit_code: ExitCode = ExitCode.FAILURE, code: Code = Code.EXCEPTION
) -> LastWord:
    error = ErrorWord(what, "fix it", "E", "", code)
    return word(rank, Ending.FAILED, ended=ended, exit_code=int(exit_code), error=error)


def after(code: Code, exit_code: ExitCode = ExitCode.FAILURE) -> Attempt:
    """An attempt that came no further and ended so."""
    return dataclasses.replace(STUCK, verdict=RunVerdict(Action.REQUEUE, exit_code, "x", code=code))


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
    assert (verdict.rank, verdict.host, verdict.fix) == (1, "n1", "fix it")


def test_a_death_comes_before_the_errors_it_causes():
    words = [failed(0, "connection lost", 5.0), word(1, Ending.KILLED, note="was killed by SIGKILL")]
    assert blame(words).reason == "rank 1 on n1 was killed by SIGKILL"


def program(rank: int, ended: float, code: int, said: str = "") -> LastWord:
    """The word of a plain command's rank."""
    return dataclasses.replace(ending(word(rank, Ending.RUNNING), "python", code, False, said), ended=ended)


GONE = "RuntimeError: the disk of the data is gone"
CLOSED = "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.1]:4711"


@pytest.mark.parametrize("cause_ended", [1.0, 2.0])
@pytest.mark.parametrize(
    "victim",
    [
        program(1, 1.5, -signal.SIGABRT),
        program(1, 1.5, -signal.SIGTERM),
        program(1, 1.5, -signal.SIGPIPE),
        program(1, 1.5, 1, CLOSED),
        word(1, Ending.KILLED, exit_code=128 + signal.SIGABRT, note="was killed by SIGABRT", code=Code.KILLED),
        word(1, Ending.KILLED, exit_code=14, note="exited with code 14", code=Code.VANISHED),
        failed(1, "rank 1 of 2 waited 60 s for the other ranks to begin", 1.5),
    ],
)
def test_a_rank_that_dies_of_another_s_death_is_not_the_cause_whichever_is_noted_first(victim, cause_ended):
    verdict = blame([program(0, cause_ended, 1, GONE), victim])
    assert verdict.rank == 0 and "the disk of the data is gone" in verdict.reason
    assert blame([victim, failed(0, "the disk of the data is gone", cause_ended)]).rank == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_rank_that_was_killed_is_the_cause_of_errors_about_lost_peers(number):
    killed = word(1, Ending.KILLED, exit_code=128 + number, note=f"was killed by {number.name}", code=Code.KILLED)
    assert blame([program(0, 1.0, 1, CLOSED), killed]).rank == 1
    assert blame([program(0, 1.0, 1, CLOSED), program(1, 1.1, -number)]).rank == 1


@pytest.mark.parametrize("ended", [1.0, 3.0])
def test_a_rank_that_wants_no_other_attempt_is_the_cause_whenever_it_said_so(ended):
    verdict = blame([program(0, ended, 64, "ConfigError: connection refused"), program(1, 2.0, 1, "lost")])
    assert (verdict.rank, verdict.action, verdict.exit_code) == (0, Action.FAIL, 64)


def test_a_rank_that_aborts_alone_or_long_before_the_others_is_the_cause():
    aborted = program(1, 1.0, -signal.SIGABRT)
    assert blame([aborted, word(0, Ending.TAKEN_DOWN)]).rank == 1
    assert blame([aborted, program(0, 1.2, 1, CLOSED)]).rank == 1
    assert blame([aborted, program(0, 100.0, 1, GONE)]).rank == 1


@pytest.mark.parametrize("code", [Code.KILLED, Code.VANISHED, Code.OUT_OF_MEMORY])
def test_what_was_found_out_of_a_death_is_the_code_of_the_verdict(code):
    verdict = blame([word(1, Ending.KILLED, note="whatever it is called, memory or not", code=code)])
    assert verdict.code is code


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


@pytest.mark.parametrize(
    ("attempt", "stop", "saves", "action"),
    [
        (STUCK, SCHEDULER, True, Action.DO_NOT_REQUEUE),
        (ADVANCED, SCHEDULER, True, Action.REQUEUE),
        (STUCK, PERSON, True, Action.STOP),
        (UNREPORTED, SCHEDULER, False, Action.REQUEUE),
        (STUCK, SCHEDULER, False, Action.DO_NOT_REQUEUE),
    ],
)
def test_ranks_that_do_not_stop_before_the_limit_get_no_further_next_time(attempt, stop, saves, action):
    late = failed_with(Code.STOP, "the ranks did not stop in time", "")
    assert decide([], [attempt], 3, stop, late, saves).action is action


@pytest.mark.parametrize("stop", [None, SCHEDULER], ids=["exit code 75", "time limit"])
def test_a_program_that_reports_its_checkpoints_is_requeued_only_after_a_new_one(stop):
    stopped = [word(rank, Ending.STOPPED, step=None) for rank in range(2)]
    advanced, stuck = (decide(stopped, [each], 3, stop, saves=False) for each in (ADVANCED, STUCK))
    assert advanced.action is Action.REQUEUE and advanced.reason.endswith(", with a checkpoint of step 20")
    assert stuck.action is Action.DO_NOT_REQUEUE and "without a new checkpoint" in stuck.reason
    ended = [dataclasses.replace(each, exit_code=0) for each in stopped]
    assert decide(ended, [STUCK], 3, stop, saves=False).action is Action.REQUEUE, "it may have come to its end"


def test_lost_nodes_are_not_counted_as_failures_of_the_run():
    lost = after(Code.NODE)
    assert trailing_failures([STUCK, lost, lost, STUCK]) == 2
    node = failed_with(Code.NODE, "a node was lost", "")
    assert decide([], [STUCK, STUCK, STUCK], max_failures=3, failure=node) == node


def test_an_attempt_that_was_replaced_is_not_run_again_and_not_counted():
    assert trailing_failures([STUCK, after(Code.IN_USE), STUCK]) == 2
    word = failed(0, "attempt 1 has been replaced by attempt 2", 1.0, ExitCode.DO_NOT_REQUEUE, Code.IN_USE)
    verdict = decide([word], [STUCK], max_failures=3)
    assert (verdict.action, verdict.exit_code, verdict.code) == (Action.DO_NOT_REQUEUE, 76, Code.IN_USE)


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
def test_of_a_plain_command_no_checkpoint_is_expected(stop, action, reason):
    verdict = decide(both(Ending.STOPPED), [UNREPORTED], max_failures=3, stop=stop, saves=False)
    assert (verdict.action, verdict.exit_code) == (action, 75)
    assert reason in verdict.reason


@pytest.mark.parametrize(
    ("code", "final"),
    [(Code.EXCEPTION, Code.NO_PROGRESS), (Code.UNKNOWN, Code.NO_PROGRESS), (Code.DISK_FULL, Code.DISK_FULL)],
)
def test_the_code_of_repeated_failures_is_the_precise_one_if_there_is_one(code, final):
    verdict = decide([failed(1, "boom", 1.0, code=code)], [STUCK] * 3, max_failures=3)
    assert (verdict.action, verdict.code) == (Action.DO_NOT_REQUEUE, final)


@pytest.mark.parametrize("code", Code)
@pytest.mark.parametrize("before_ranks", [False, True])
def test_a_verdict_is_read_as_it_was_written(code, before_ranks):
    verdict = RunVerdict(
        Action.FAIL, ExitCode.USER_ERROR, "a", "b", 1, "n1", code, before_ranks or code is Code.PREFLIGHT
    )
    assert RunVerdict.from_json(verdict.to_json()) == verdict


@pytest.mark.parametrize("saved", [{}, {"action": None}, {"action": "of a later version"}])
def test_what_is_no_verdict(saved):
    assert RunVerdict.from_json(saved) is None


def test_an_attempt_is_read_as_it_was_written():
    known = {"versions": {"numpy": "2"}, "git_commit": "abc", "verdict": STUCK.verdict}
    attempt = Attempt(3, 1.0, 2.0, 4, 8, "n1", ("n1", "n2"), "7_1", "9", 2, 8, 2, 2, None, "gradients", **known)  # type: ignore[arg-type]
    assert Attempt.from_json({**attempt.to_json(), "mood": "good"}) == attempt
    assert Attempt.from_json({"attempt": 1, "verdict": None, "hosts": None}) == Attempt(1)


def test_an_orderly_end_says_where_and_whether_it_came_early():
    assert decide(both(Ending.COMPLETED), [ADVANCED], 3).reason == "done after step 7"
    assert decide(both(Ending.EARLY), [ADVANCED], 3).reason == "stopped early after step 7"
    assert decide(both(Ending.EARLY), [ADVANCED], 3, saves=False).reason == "stopped early"
    uneven = [word(0, Ending.COMPLETED), word(1, Ending.EARLY, step=9)]
    assert decide(uneven, [ADVANCED], 3).reason == "stopped early after step 9"


@pytest.mark.parametrize("step", [0, None])
def test_a_run_that_ended_before_its_first_step_ended_at_step_0(step):
    words = [word(rank, Ending.STOPPED, step=step) for rank in range(2)]
    assert decide(words, [ADVANCED], 3, PERSON).reason == "stopped by signal SIGINT at step 0"


def test_a_run_that_saves_nothing_is_started_again_unless_a_person_stopped_it():
    def verdict(stop):
        decided = decide(both(Ending.STOPPED), [UNREPORTED], 3, stop, saves=False)
        return decided.action, decided.reason

    assert verdict(SCHEDULER) == (Action.REQUEUE, "stopped by signal SIGUSR1")
    assert verdict(None) == (Action.REQUEUE, "asked to be run again (exit code 75)")
    assert verdict(PERSON) == (Action.STOP, "stopped by signal SIGINT at step 7")
    assert decide(both(Ending.STOPPED), [STUCK], 3).action is Action.STOP, "nobody told who asked: nobody goes on"


def test_a_stop_before_any_attempt_is_known_is_no_lack_of_progress():
    assert decide(both(Ending.STOPPED), [], 3, SCHEDULER).action is Action.REQUEUE


def test_one_failure_that_is_one_too_many_is_told_as_one():
    verdict = decide([failed(1, "boom", 1.0)], [STUCK], max_failures=1)
    assert verdict.reason == "rank 1 on n1: boom, without a new checkpoint; launch.max_failures is 1"
    assert (verdict.action, verdict.code) == (Action.DO_NOT_REQUEUE, Code.NO_PROGRESS)
    death = [word(1, Ending.KILLED, code=Code.OUT_OF_MEMORY)]
    assert decide(death, [STUCK], max_failures=1).code is Code.OUT_OF_MEMORY, "the cause says more than that"


def test_what_the_supervisor_found_out_counts_whatever_the_ranks_say():
    hang = failed_with(Code.HANG, "no rank moved", "")
    assert decide(both(Ending.COMPLETED), [ADVANCED], 3, failure=hang) == hang


def test_who_asked_a_failed_attempt_to_stop_is_told_once():
    told = [failed(0, what, 1.0) for what in ("x", "stopped by signal SIGINT before training began (make the task)")]
    reasons = [decide([one], [ADVANCED], 3, PERSON).reason for one in told]
    assert [reason.count("signal SIGINT") for reason in reasons] == [1, 1]


def test_ranks_without_a_word_are_named_up_to_eight():
    one = blame([word(2, Ending.VANISHED, note="its node is gone"), word(0, Ending.COMPLETED)])
    assert (one.reason, one.rank, one.host) == (
        "rank 2 left no exit record (its node is gone)",
        2,
        "n2",
    )
    many = blame([word(rank, Ending.VANISHED) for rank in range(10)])
    assert (many.reason, many.rank) == ("ranks 0, 1, 2, 3, 4, 5, 6, 7 left no exit record", 0)
    first = blame([word(0, Ending.VANISHED, note="its node is gone"), word(1, Ending.VANISHED)])
    assert first.reason == "ranks 0, 1 left no exit record (its node is gone)", (
        "what is known of the one that is blamed"
    )
    unnumbered = blame([dataclasses.replace(word(0, Ending.VANISHED), rank=None)])
    assert unnumbered.reason == "rank ? left no exit record"


def test_an_error_of_some_ranks_names_the_first_and_one_alone_too():
    assert blame([failed(0, "no such file", 1.0)]).reason == "rank 0 on n0: no such file"
    several = [failed(0, "lost", 2.0), failed(1, "lost", 3.0), failed(2, "no such file", 1.0)]
    assert blame(several).reason == "rank 2 on n2: no such file"


def test_a_death_without_a_note_is_a_death():
    assert blame([word(1, Ending.KILLED)]).reason == "rank 1 on n1 died"
    assert blame([word(1, Ending.KILLED)]).fix == "see the rank's log"


def test_an_attempt_killed_with_its_supervisor_came_as_far_as_the_next_one_began():
    killed, next_one = Attempt(1, from_step=10), Attempt(2, from_step=20, to_step=20, verdict=STUCK.verdict)
    assert trailing_failures([killed, next_one]) == 1, "it had saved step 20"
    again = dataclasses.replace(next_one, from_step=10, to_step=10)
    assert trailing_failures([killed, again]) == 2


def test_ranks_that_share_out_a_model_are_told_with_their_places():
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
        "ranks 1 (data 0, tensor 1), 9 left no exit record",
    ]


@pytest.mark.parametrize(
    ("parallel", "plan"),
    [
        (ParallelConfig(), ""),
        (ParallelConfig(tensor=2), "tensor 2 x data 2"),
        (ParallelConfig(shard="optimizer"), "shard optimizer"),
    ],
)
def test_the_plan_of_an_attempt_is_kept(parallel, plan):
    attempt = Attempt(1, ranks=4).under(parallel)
    saved = attempt.to_json()
    assert Attempt.from_json(saved).plan == plan
    assert {"tensor", "shard"} & saved.keys() == {word.split()[0] for word in plan.split(", ") if word}


def test_an_error_that_repeats_at_the_same_step_is_not_tried_again():
    at = [dataclasses.replace(failed(1, "boom", 1.0), step=3)]
    later = [dataclasses.replace(failed(1, "boom", 1.0), step=4)]
    verdict = decide(at, [STUCK, ADVANCED], 3, before=at)
    assert (verdict.action, verdict.exit_code, verdict.code) == (Action.DO_NOT_REQUEUE, 76, Code.NO_PROGRESS)
    assert verdict.reason.endswith("boom, for the second time at step 3")
    assert decide(at, [ADVANCED], 3, before=later).action is Action.REQUEUE
    assert decide(at, [ADVANCED], 3, before=[failed(1, "other", 1.0)]).action is Action.REQUEUE
    nan = [dataclasses.replace(failed(1, "loss is nan", 1.0, code=Code.NAN), step=3)]
    assert decide(nan, [ADVANCED], 3, before=nan).action is Action.DO_NOT_REQUEUE, "an error of the task's own"
    nowhere = [dataclasses.replace(failed(1, "boom", 1.0), step=None)]
    assert decide(nowhere, [ADVANCED], 3, before=nowhere).reason.endswith("for the second time before the first step")
    plain = [program(1, 1.0, 1, GONE)]
    assert decide(plain, [ADVANCED], 3, before=plain).action is Action.REQUEUE, "nobody knows its step"
    disk = [dataclasses.replace(failed(1, "boom", 1.0, code=Code.UNREADABLE_CHECKPOINT), step=3)]
    assert decide(disk, [ADVANCED], 3, before=disk).action is Action.REQUEUE
    dead = [word(1, Ending.KILLED, note="was killed by SIGKILL", code=Code.KILLED)]
    assert decide(dead, [ADVANCED], 3, before=dead).action is Action.REQUEUE
    full, fuller = (
        [dataclasses.replace(failed(0, f"{left} MB free", 1.0, code=Code.DISK_FULL), step=20)] for left in (2, 1)
    )
    assert decide(full, [STUCK], 3).action is Action.REQUEUE, "somebody may free space meanwhile"
    verdict = decide(fuller, [STUCK, STUCK], 3, before=full)
    assert (verdict.action, verdict.code) == (Action.DO_NOT_REQUEUE, Code.DISK_FULL)
    assert verdict.reason.endswith("1 MB free, for the second time at step 20")


@pytest.mark.parametrize(
    ("by_person", "saves", "action"), [(True, True, "stop"), (False, True, "requeue"), (True, False, "stop")]
)
def test_a_stop_before_any_rank_has_begun_is_a_stop(by_person, saves, action):
    verdict = decide([], [STUCK], 3, Stop("SIGTERM", by_person), saves=saves)
    assert (verdict.action.value, verdict.exit_code) == (action, 75)
    assert verdict.reason == "stopped by SIGTERM before any rank began"


def test_if_no_failure_is_allowed_the_first_one_ends_the_run_with_its_own_code():
    verdict = decide([failed(1, "boom", 1.0)], [ADVANCED], max_failures=0)
    assert (verdict.action, verdict.exit_code) == (Action.DO_NOT_REQUEUE, 70)


@pytest.mark.parametrize(
    ("verdict", "asked", "again"),
    [
        (failed_with(Code.KILLED, "x", ""), False, True),
        (failed_with(Code.KILLED, "x", ""), True, False),
        (dataclasses.replace(failed_with(Code.NODE, "x", ""), before_ranks=True), False, False),
        (RunVerdict(Action.REQUEUE, ExitCode.STOPPED, "x"), False, False),
        (RunVerdict(Action.FAIL, ExitCode.USER_ERROR, "x"), False, False),
        (RunVerdict(Action.DO_NOT_REQUEUE, ExitCode.DO_NOT_REQUEUE, "x"), False, False),
        (RunVerdict(Action.DONE, ExitCode.DONE, "x"), False, False),
    ],
)
def test_what_is_started_again_in_place(verdict, asked, again):
    assert starts_again(verdict, asked) is again


def test_an_error_without_a_time_comes_first():
    verdict = blame([failed(0, "the data is bad", 5.0), failed(1, "the disk is bad", None)])
    assert verdict.reason == "rank 1 on n1: the disk is bad"


def test_two_failures_in_a_row_are_counted():
    verdict = decide([failed(1, "boom", 1.0)], [STUCK, STUCK], max_failures=2)
    assert verdict.reason.startswith("2 attempts in a row failed without a new checkpoint; the last one: ")


@pytest.mark.parametrize(("rank", "place"), [(3, " (data 1, tensor 1)"), (4, "")])
def test_a_rank_beyond_the_grid_has_no_place_in_it(rank, place):
    assert blame([failed(rank, "boom", 1.0)], Grid(4, tensor=2)).reason == f"rank {rank}{place} on n{rank}: boom"
