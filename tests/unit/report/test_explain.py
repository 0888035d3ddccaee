"""What ``explain`` says, from histories made by hand: sentences, thresholds, and what comes first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpctrain.errors import Code, ExitCode
from hpctrain.report.explain import Explanation, explain
from hpctrain.run.attempts import Attempt
from hpctrain.run.events import (
    CheckpointFailed,
    CheckpointSaved,
    Event,
    Recovered,
    Resumed,
    RunFinished,
    RunStarted,
    StopRequested,
    Straggler,
    Train,
)
from hpctrain.run.history import RunHistory, Series
from hpctrain.run.progress import Progress
from hpctrain.run.run_status import RunSnapshot, RunState, Word
from hpctrain.run.verdict import Action, RunVerdict


def history(
    *rare: Event,
    attempts: Sequence[Attempt] = (),
    phases: Mapping[str, float] | None = None,
    counts: Mapping[str, int] | None = None,
    reducer: Mapping[str, Any] | None = None,
) -> RunHistory:
    """A run of these attempts and rare events, with so many seconds in each phase of its only interval."""
    progress = Progress()
    for event in rare:
        progress.add(event)
    run = RunSnapshot(Path("run"), None, {}, tuple(attempts), progress, reducer=reducer or {})
    spent = {name: Series(np.ones(1), np.ones(1), np.array([seconds])) for name, seconds in (phases or {}).items()}
    loss = {"loss": Series(np.ones(1), np.ones(1), np.ones(1))}
    return RunHistory(
        run, loss if phases else {}, spent, {}, tuple(rare), {"train": 1} if counts is None else dict(counts)
    )


def ended(action: Action, reason: str = "", code: Code = Code.UNKNOWN, number: int = 1, **fields: Any) -> Attempt:
    exit_code = {Action.DONE: ExitCode.DONE, Action.STOP: ExitCode.STOPPED}.get(action, ExitCode.FAILURE)
    return Attempt(number, 1.0, 2.0, verdict=RunVerdict(action, exit_code, reason, code=code, **fields))


RUNNING = (Attempt(1, 1.0),)
COMPUTING = {"forward": 70.0}


@pytest.mark.parametrize(
    ("phases", "causes"),
    [
        ({"forward": 79.0, "data": 21.0}, Code.DATA_BOUND),
        ({"forward": 80.0, "data": 20.0}, Code.RUNNING),
        ({"forward": 69.0, "exchange": 31.0}, Code.EXCHANGE_BOUND),
        ({"forward": 70.0, "exchange": 30.0}, Code.RUNNING),
        ({"forward": 30.0, "data": 29.0}, Code.RUNNING),  # of a run that the report calls too short to judge
        ({"forward": 30.0, "data": 30.0}, Code.DATA_BOUND),
    ],
)
def test_time_that_does_not_compute_is_told_beyond_its_threshold(phases, causes):
    answer = explain(history(attempts=RUNNING, phases=phases))
    assert answer.cause is causes
    if causes is not Code.RUNNING:
        assert (
            answer.advice
            and f"{phases.get('data', phases.get('exchange', 0)) / sum(phases.values()):.0%}" in answer.title
        )


CHOSEN = {"reducer": "mpi-node", "seconds": {"mpi-node": 0.1, "horovod-flat": 0.08}}


@pytest.mark.parametrize(("forward", "exchange", "told"), [(0.08, 0.06, True), (0.08, 0.04, False), (0.2, 0.06, False)])
def test_an_exchange_that_takes_longer_than_in_trial_steps_is_told(forward, exchange, told):
    """Not if the step is little longer, if it is passes that take longer, or in the first seconds of a run."""
    train = Train(step=10, attempt=1, steps=10, seconds={"forward": 10 * forward, "exchange": 10 * exchange})
    for phases, measured in ((COMPUTING, True), ({"forward": 59.0}, False)):
        answer = explain(history(train, attempts=RUNNING, phases=phases, reducer=CHOSEN))
        assert ("exchange 0.06 s; trial steps took 0.1 s" in answer.title) is (told and measured)
        assert ("mpi-node" in answer.advice) is (told and measured)


def test_gradients_of_gpus_that_go_through_host_memory_are_told_with_their_cost():
    started = RunStarted(step=0, attempt=1, through_host_s=0.26)
    answer = explain(history(started, attempts=RUNNING, phases=COMPUTING))
    assert "gradients of GPUs go through host memory: about 0.26 s per update" in answer.title
    assert "one rank per GPU" in answer.advice


def test_both_are_told_the_costlier_as_the_title():
    answer = explain(history(attempts=RUNNING, phases={"forward": 40.0, "data": 25.0, "exchange": 35.0}))
    assert answer.title == "The run is under way; 35% of the time is spent exchanging gradients"
    assert answer.findings == ("25% of the time is spent waiting for data",)
    assert "train.accumulate" in answer.advice


def slow(rank: int | None, cost: float | None, state: str = "confirmed", **fields: Any) -> Straggler:
    told = None if rank is None else f"rank {rank} is slow"
    ranks = () if rank is None else (rank,)
    about = {"kind": "rank", "rank": rank, "ranks": ranks, "cause": "data", "sentence": told}
    return Straggler(**{"step": 1, "attempt": 1, "cost": cost, "state": state, **about, **fields})


def findings(*events: Straggler) -> list[str]:
    """What is said of slow ranks in a run that has failed."""
    failed = ended(Action.FAIL, "no", Code.USER_ERROR)
    return list(explain(history(*events, attempts=[failed])).findings)


def test_slow_ranks_are_told_if_they_are_confirmed_and_cost_a_twentieth():
    assert findings(slow(1, 0.05)) == ["Rank 1 is slow"]
    assert findings(slow(1, 0.049), slow(2, None), slow(3, 0.5, "suspect")) == []
    host = Straggler(
        step=1, attempt=1, kind="host", host="n1", cause="data", cost=0.5, state="confirmed", sentence="n1 is"
    )
    assert findings(host) == ["N1 is"]


def test_what_costs_most_is_said_first_whether_or_not_a_rank_is_to_blame():
    """A confirmed 60% was left out, and the run was said to read data too slowly."""
    uneven = slow(None, 0.6, kind="imbalance", sentence="ranks have unequal work")
    answer = explain(history(uneven, slow(1, 0.1), attempts=RUNNING, phases={"forward": 70.0, "data": 30.0}))
    assert answer.title == "The run is under way; ranks have unequal work"
    assert answer.findings == ("30% of the time is spent waiting for data", "Rank 1 is slow")


def test_the_three_that_cost_most_are_told_once_each_worst_first():
    events = [slow(rank, cost) for rank, cost in ((2, 0.05), (1, 0.1), (2, 0.3), (3, 0.2), (4, 0.4))]
    assert findings(*events) == ["Rank 4 is slow", "Rank 2 is slow", "Rank 3 is slow"]


def test_a_slow_rank_that_recovered_counts_for_the_steps_in_which_it_was_slow():
    """It was told as if it had been slow all the time: 'rank 0 is 33% slower' of 1% of the steps."""

    def told(*events, steps=1000):
        made = history(*events, attempts=[ended(Action.FAIL, "no", Code.USER_ERROR)])
        loss = Series(np.array([1.0, steps]), np.ones(2), np.ones(2))
        return list(explain(replace(made, train={"loss": loss})).findings)

    def at(step, state, attempt=1):
        return slow(1, 0.2, state, step=step, attempt=attempt)

    assert told(at(100, "confirmed"), at(200, "cleared")) == []
    assert told(at(100, "confirmed"), at(500, "cleared")) == ["From step 100 to 500, rank 1 is slow"]
    flaps = [one for step in (100, 300, 500) for one in (at(step, "confirmed"), at(step + 100, "cleared"))]
    assert told(*flaps) == ["From step 100 to 200, rank 1 is slow"], "their sum counts"
    assert told(at(100, "confirmed"), at(150, "confirmed")) == ["Rank 1 is slow"], "it still is"
    again = Resumed(step=700, attempt=2)
    assert told(at(100, "confirmed"), again) == ["From step 100 to 700, rank 1 is slow"]
    assert told(at(800, "confirmed"), again) == [], "in steps that were done again"
    assert told(at(800, "confirmed"), again, at(900, "confirmed", 2)) == ["Rank 1 is slow"]


@pytest.mark.parametrize(
    ("failures", "saved_at", "evidence"),
    [
        (3, None, "the last 3 attempts to save failed, and there is none: what was trained since is not saved"),
        (1, 5.0, "none has been saved since, and the newest one is from step 7: what was trained since is not saved"),
        (1, 10.0, None),
        (1, 20.0, None),
        (None, None, "none has been saved since, and there is none: what was trained since is not saved"),
    ],
)
def test_checkpoints_that_could_not_be_written(failures, saved_at, evidence):
    failed = CheckpointFailed(time=10.0, step=9, attempt=1, error="disk full", failures=failures)
    saved = [] if saved_at is None else [CheckpointSaved(time=saved_at, step=7, attempt=1)]
    counts = {"train": 1, CheckpointFailed.NAME: failures or 1}
    answer = explain(history(*saved, failed, attempts=RUNNING, phases=COMPUTING, counts=counts))
    assert answer.cause is Code.CHECKPOINT_FAILED
    several = "1 checkpoint" if failures in (1, None) else f"{failures} checkpoints"
    assert answer.title == f"The run is under way; {several} could not be written, the last at step 9: disk full"
    assert answer.evidence == (() if evidence is None else (evidence,))


@pytest.mark.parametrize(
    ("events", "by", "kept"),
    [
        ([], "a request was seen", "no checkpoint was saved"),
        (
            [StopRequested(step=5, attempt=1)],
            "the ranks stopped after step 5, as asked by a request",
            "no checkpoint was saved",
        ),
        (
            [
                StopRequested(step=3, attempt=1),
                StopRequested(step=5, attempt=1, by="STOP"),
                CheckpointSaved(step=4, attempt=1),
            ],
            "the ranks stopped after step 5, as asked by STOP",
            "the newest checkpoint is from step 4",
        ),
    ],
)
def test_a_run_that_was_asked_to_stop(events, by, kept):
    answer = explain(history(*events, attempts=[ended(Action.STOP)]))
    assert (answer.cause, answer.evidence) == (Code.STOPPED, (by, kept))


@pytest.mark.parametrize("of", ["event", "verdict"])
def test_either_the_request_or_the_verdict_tells_of_the_time_limit(of):
    code = Code.TIME_LIMIT if of == "verdict" else Code.STOPPED
    request = StopRequested(step=5, attempt=1, code=Code.TIME_LIMIT.value if of == "event" else None)
    assert explain(history(request, attempts=[ended(Action.STOP, code=code)])).cause is Code.TIME_LIMIT


def test_a_stop_before_the_first_step_is_told_by_its_verdict_and_not_by_an_older_request():
    reason = "stopped by signal SIGUSR1 before training began (make the task)"
    verdict = RunVerdict(Action.REQUEUE, ExitCode.STOPPED, reason, code=Code.TIME_LIMIT)
    attempts = [ended(Action.REQUEUE), Attempt(2, 3.0, 4.0, verdict=verdict)]
    answer = explain(history(StopRequested(step=5, attempt=1, by="STOP"), attempts=attempts))
    assert (answer.cause, answer.evidence[0]) == (Code.TIME_LIMIT, reason)


@pytest.mark.parametrize(
    ("attempts", "reason", "title", "evidence"),
    [
        (0, "completed", "The run completed", "it reached step 12 in 1 attempt"),
        (1, "completed", "The run completed", "it reached step 12 in 1 attempt"),
        (2, "completed", "The run completed", "it reached step 12 in 2 attempts"),
        (1, "early_stop", "The run ended early: its metric no longer improved", "it reached step 12 in 1 attempt"),
    ],
)
def test_a_run_that_came_to_its_end(attempts, reason, title, evidence):
    finished = RunFinished(step=12, attempt=attempts, reason=reason)
    answer = explain(history(finished, attempts=[Attempt(number + 1, 1.0) for number in range(attempts)]))
    assert (answer.cause, answer.title, answer.evidence) == (Code.COMPLETED, title, (evidence,))


def test_an_end_of_which_only_the_verdict_tells():
    answer = explain(history(attempts=[ended(Action.DONE)]))
    assert (answer.cause, answer.evidence) == (Code.COMPLETED, ("its command succeeded in 1 attempt",))


def test_what_is_missing_is_named_if_nobody_knows():
    nothing = explain(history(counts={}))
    assert (nothing.cause, nothing.evidence) == (
        Code.UNKNOWN,
        ("the run folder has no events, no attempts, no exit records",),
    )
    assert explain(history(attempts=[Attempt(1, 1.0, 2.0)])).evidence == ("the run folder has no exit records",)
    assert explain(history(attempts=RUNNING)).cause is Code.UNKNOWN, "it has not said anything of its training"


@pytest.mark.parametrize(
    ("state", "cause", "title", "evidence", "advice"),
    [
        (
            RunState(Word.RUNNING, "job 7 runs", code=Code.KILLED),
            Code.RUNNING,
            "The run continues",
            ("job 7 runs",),
            "",
        ),
        (RunState(Word.PENDING, fix="wait"), Code.UNKNOWN, "The run has not begun", (), "wait"),
        (
            RunState(Word.CANCELLED, "job 7 was cancelled", code=Code.CANCELLED),
            Code.CANCELLED,
            "The run's job was cancelled",
            ("job 7 was cancelled",),
            "hpctrain resume submits it again",
        ),
        (
            RunState(Word.UNKNOWN, "its process is gone"),
            Code.UNKNOWN,
            "It is unknown what ended this run",
            ("its process is gone",),
            "look at the job's own log and at logs/",
        ),
    ],
)
def test_a_run_that_has_not_said_how_it_ended_is_told_by_its_job(state, cause, title, evidence, advice):
    assert explain(history(attempts=[Attempt(1, 1.0, 2.0)]), state) == Explanation(cause, title, evidence, advice)


def test_a_run_with_steps_that_waits_has_begun():
    waits = RunState(Word.PENDING, "job 8 waits (Priority)")
    assert explain(history(phases=COMPUTING), waits).title == "The run waits to continue"


def test_what_a_job_says_adds_to_a_failure_only_that_it_is_to_resume_and_nothing_to_an_end():
    pending = RunState(Word.PENDING, "job 8 waits", fix="wait")
    failed = explain(history(attempts=[ended(Action.FAIL, "no", Code.USER_ERROR)]), pending)
    assert (failed.cause, failed.findings) == (Code.USER_ERROR, ("it will resume: job 8 waits", "wait"))
    done = history(attempts=[ended(Action.DONE)])
    assert explain(done, pending) == explain(done)


def test_the_rank_and_its_host_are_told_unless_the_reason_says_so():
    def evidence(reason, **fields):
        return explain(history(attempts=[ended(Action.REQUEUE, reason, Code.EXCEPTION, 2, **fields)])).evidence

    assert evidence("no", rank=3, host="n1") == ("rank 3 on n1, attempt 2: no",)
    assert evidence("no", rank=0) == ("rank 0, attempt 2: no",)
    assert evidence("rank 3 says no", rank=3, host="n1") == ("rank 3 says no",)
    assert evidence("no") == ("no",)


def test_the_text_is_sentences():
    found = Explanation(Code.NAN, "x", ("first", "second!"), "do this.", ("is it so?", ""))
    assert found.text == "First. Second! Do this. Is it so?"
    assert Explanation(Code.NAN, "x").text == ""


def test_a_failure_of_a_rank_that_shares_out_a_model_names_its_place():
    failed = replace(ended(Action.REQUEUE, "boom", Code.EXCEPTION, rank=3, host="n1"), ranks=4, tensor=2)
    assert explain(history(attempts=[failed])).evidence == ("rank 3 (data 1, tensor 1) on n1, attempt 1: boom",)


def test_failures_that_the_run_recovered_from_are_told_with_their_cost():
    one = Recovered(step=11, time=90.0, attempt=2, reason="rank 1 on n1 was killed", seconds=3.0, repeated_steps=4)
    finished = RunFinished(step=12, time=100.0, attempt=2, reason="completed")
    [told] = explain(history(one, finished, attempts=[Attempt(1, 1.0), Attempt(2, 2.0)])).findings
    assert told == "recovered after 3.0 s, 4 steps done again: rank 1 on n1 was killed"
    train = Train(step=10, steps=10, time=9.0, attempt=1, seconds={"forward": 5.0})
    seven = explain(history(train, *[one] * 7, finished, attempts=[Attempt(1, 1.0), Attempt(2, 2.0, 101.0)])).findings
    # 21 s from deaths to steps, and 28 steps of half a second.
    goodput = "goodput 5% of 1 min 40 s; lost: 35.0 s to 7 failures, 28 steps done again"
    assert seven == ("recovered 7 times; the last 4", *[told] * 4, goodput)
