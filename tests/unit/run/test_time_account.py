"""Where the time of a run goes."""

from __future__ import annotations

import dataclasses

import pytest

from hpctrain.errors import Code, ExitCode
from hpctrain.run.attempts import Attempt
from hpctrain.run.time_account import ATTEMPTS, RECOVERIES, Sums
from hpctrain.run.verdict import Action, RunVerdict, failed_with
from tests.unit.run.test_progress import add, event, progress, trained

KILLED = failed_with(Code.KILLED, "rank 1 on n1 was killed by SIGKILL", "", 1, "n1")
STOPPED = RunVerdict(Action.STOP, ExitCode.STOPPED, "stopped")
DONE = RunVerdict(Action.DONE, ExitCode.DONE, "done")


def recovered(step: int, attempt: int, at: float, seconds: float, repeated: int) -> dict[str, object]:
    return event("recovered", step, attempt, at, seconds=seconds, repeated_steps=repeated, reason=KILLED.reason)


def test_a_run_that_is_killed_stopped_and_resumed():
    """An interval is 10 steps, of which 5 s count."""
    made = progress(
        event("run_started", 0, at=5),
        trained(10, at=15),
        event("checkpoint_saved", 10, at=16, stall_s=1.0),
        trained(20, at=26),
        event("run_started", 0, attempt=2, at=33),
        event("resumed", 10, attempt=2, at=34),
        recovered(11, 2, at=36, seconds=8.0, repeated=10),
        trained(20, attempt=2, at=45),  # again
        trained(30, attempt=2, at=55),
        event("snapshot_saved", 30, attempt=2, at=56, stall_s=0.5),
        event("run_started", 30, attempt=3, at=1003),
        trained(40, attempt=3, at=1015),
    )
    attempts = (
        Attempt(1, 0.0, 29.0, verdict=KILLED),
        Attempt(2, 29.0, 60.0, verdict=STOPPED),
        Attempt(3, 1000.0, 1020.0, verdict=DONE),
    )
    account = made.sums.account(attempts)
    assert (account.wall_s, account.steps_s, account.saving_s) == (1020, 4 * 5, 1.5)
    assert (account.failures, account.failures_s, account.repeated_steps) == (1, 8 + 10 * 0.5, 10)
    assert account.waiting_s == 940
    assert account.goodput == 20 / 1020
    assert account.text == (
        "2% of 17 min 00 s; lost: 13.0 s to 1 failure, 10 steps done again; 15 min 40 s waiting; 1.5 s saving"
    )
    told = dataclasses.replace(account, waiting_s=0.0, saving_s=1.0, failures=2, repeated_steps=0)
    assert told.text == "2% of 17 min 00 s; lost: 13.0 s to 2 failures", "what is below a thousandth is not told"
    assert [each.attempt for each in made.sums.recoveries] == [2]


def test_starts_of_a_complete_run_take_none_of_its_time():
    """Its goodput fell with each, as if it had waited for them."""
    events = event("run_started", 0, at=5), trained(10, at=15), event("run_started", 10, attempt=2, at=1005)
    first = Attempt(1, 0.0, 20.0, from_step=None, to_step=10, verdict=DONE)
    again = Attempt(2, 1000.0, 1010.0, from_step=10, to_step=10, verdict=DONE)
    alone = progress(*events[:2]).sums.account([first])
    assert progress(*events).sums.account([first, again]) == alone and alone.wall_s == 20
    longer = Attempt(3, 2000.0, 2010.0, from_step=10, to_step=20, verdict=DONE)
    assert progress(*events).sums.account([first, again, longer]).wall_s == 2010


@pytest.mark.parametrize(("restarts", "waiting_s", "failures_s"), [(0, 0.0, 60.0), (1, 50.0, 10.0)])
def test_a_requeue_waits_and_a_restart_in_the_job_does_not(restarts, waiting_s, failures_s):
    made = progress(trained(10, at=15), recovered(11, 2, at=80, seconds=60.0, repeated=0))
    first = Attempt(1, 0.0, 20.0, job="7", restarts=0, verdict=KILLED)
    account = made.sums.account((first, Attempt(2, 70.0, job="7", restarts=restarts)))
    assert (account.waiting_s, account.failures_s) == (waiting_s, failures_s)


def test_an_attempt_that_died_with_its_supervisor_ends_with_its_newest_event():
    made = progress(trained(10, at=15), trained(20, attempt=2, at=115))
    account = made.sums.account((Attempt(1, 0.0), Attempt(2, 100.0)))
    assert (account.wall_s, account.waiting_s) == (115, 85)


@pytest.mark.parametrize("at", [-3600, 3600])
def test_a_clock_that_is_set_back_makes_no_goodput_above_one_and_no_negative_times(at):
    """An interval is 10 steps, of which 5 s count; the clock is set back before the second, or before it all."""
    made = progress(
        event("run_started", 0, at=4000),
        *(trained(step, at=4000 + step) for step in (10, 20)),
        *(trained(step, attempt=2, at=4000 + at + step) for step in (30, 40, 50)),
        recovered(30, 2, at=4000 + at + 25, seconds=-3500.0, repeated=0),
    )
    first, second = Attempt(1, 3990.0, 4021.0, verdict=KILLED), Attempt(2, 4022.0 + at, 4060.0 + at, verdict=DONE)
    account = made.sums.account((first, second))
    assert 0 < (account.goodput or 0) <= 1
    assert min(account.wall_s, account.failures_s, account.waiting_s) >= 0


def test_goodput_is_at_most_one_if_steps_took_longer_than_the_clock_says():
    made = progress(*(trained(step, at=100) for step in range(10, 70, 10)))
    account = made.sums.account((Attempt(1, 95.0, 97.0, verdict=DONE),))
    assert (account.wall_s, account.goodput) == (5, 1.0)


def test_without_attempts_the_events_are_the_run_and_without_steps_nothing_is_said():
    account = progress(event("run_started", 0, at=5), trained(10, at=15)).sums.account(())
    assert (account.wall_s, account.goodput, account.text) == (10, 0.5, "too short to judge (10.0 s)")
    nothing = Sums().account(())
    assert (nothing.wall_s, nothing.goodput, nothing.text) == (0, None, "")


def test_a_short_run_is_not_judged_unless_it_survived_a_failure():
    failure = recovered(1, 1, at=10, seconds=8.0, repeated=0)
    short, failed = (progress(event("run_started", 0, at=0), *more, trained(10, at=59)) for more in ((), (failure,)))
    assert short.sums.account(()).text == "too short to judge (59.0 s)"
    assert failed.sums.account(()).text.startswith("8% of 59.0 s; lost: ")
    assert progress(event("run_started", 0, at=0), trained(10, at=60)).sums.account(()).text == "8% of 1 min 00 s"


def test_memory_does_not_grow_with_the_attempts():
    sums = progress(*(recovered(1, number, at=number, seconds=1.0, repeated=0) for number in range(1, 1500))).sums
    assert (len(sums.times), len(sums.recoveries)) == (ATTEMPTS, RECOVERIES)
    assert sums.account(()).failures == 1499


def test_a_run_that_began_again_counts_from_there():
    made = progress(event("run_started", 0, at=5), trained(10, at=15), recovered(11, 1, at=16, seconds=8.0, repeated=4))
    made.count_from(2)
    for each in (event("run_started", 0, attempt=2, at=100), trained(10, attempt=2, at=110)):
        add(made, each)
    made.count_from(2)
    add(made, recovered(11, 1, at=17, seconds=8.0, repeated=4))  # of the monitor's file, read later
    account = made.sums.account([Attempt(2, 99.0, 120.0, verdict=DONE)])
    assert (account.failures, account.repeated_steps, account.steps_s, account.wall_s) == (0, 0, 5, 21)
