"""What a failed attempt cost the next one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from hpctrain.errors import Code, ExitCode
from hpctrain.rank.recovery_note import loss_before
from hpctrain.run.attempts import Attempts
from hpctrain.run.event_log import EventWriter, stored_events_at_end
from hpctrain.run.events import Recovered, Train, decode, encode
from hpctrain.run.folder import RunDir
from hpctrain.run.last_words import Ending, first_word
from hpctrain.run.progress import Progress
from hpctrain.run.verdict import Action, RunVerdict, failed_with

KILLED = failed_with(Code.KILLED, "rank 1 on n1 was killed by SIGKILL", "", 1, "n1")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path)
    run.create()
    return run


def end(run: RunDir, verdict: RunVerdict, step: int) -> int:
    """One attempt that reports a step and ends so; its number."""
    number = Attempts(run).begin()
    writer = EventWriter(run.events, print)
    writer.append(Train(step=step, attempt=number))
    writer.close()
    Attempts(run).end(number, verdict, [])
    return number


def test_a_failure_is_told_with_its_first_death_and_the_steps_that_are_done_again(run):
    number = end(run, KILLED, 17)
    run.monitor.mkdir(exist_ok=True)
    (run.monitor / f"deaths-{number}-n1.txt").write_text("1000.5 1\n1002.0 0\n")
    loss = loss_before(run, number + 1)
    assert loss is not None and (loss.since, loss.reached) == (1000.5, 17)
    event = loss.recovered(first_step=11, now=1004.0, began_at=10)
    assert (event.step, event.rank, event.host, event.code) == (11, 1, "n1", "killed")
    assert (event.seconds, event.repeated_steps) == (3.5, 7)
    [read] = decode(encode(event))
    assert isinstance(read, Recovered) and read.text == f"recovered after 3.5 s, 7 steps done again: {KILLED.reason}"
    progress = Progress()
    progress.add(event)
    assert [warned.text for warned in progress.warnings] == [event.text]


def test_without_deaths_the_earliest_last_word_or_the_end_counts(run):
    number = end(run, KILLED, 5)
    [attempt] = Attempts(run).all()
    loss = loss_before(run, number + 1)
    assert loss is not None and loss.since == attempt.ended
    word = dataclasses.replace(first_word(0), ending=Ending.FAILED, ended=7.0, step=9)
    Attempts(run).end(number, KILLED, [word])
    loss = loss_before(run, number + 1)
    assert loss is not None and (loss.since, loss.reached) == (7.0, 9)


def test_an_attempt_that_failed_before_its_first_step_prolongs_the_failure_before_it(run):
    first = end(run, KILLED, 17)
    (run.monitor / f"deaths-{first}-n1.txt").write_text("1000.5 1\n")
    number = Attempts(run).begin()
    Attempts(run).end(number, failed_with(Code.VANISHED, "a host does not answer", ""), [])
    assert loss_before(run, number + 1) == loss_before(run, number)


@pytest.mark.parametrize(
    "verdict",
    [
        RunVerdict(Action.REQUEUE, ExitCode.STOPPED, "x"),
        RunVerdict(Action.DONE, ExitCode.DONE, "x"),
        RunVerdict(Action.FAIL, ExitCode.USER_ERROR, "x"),
    ],
)
def test_what_ended_in_order_or_had_to_be_corrected_is_no_loss(run, verdict):
    assert loss_before(run, 1) is None
    assert loss_before(run, end(run, verdict, 5) + 1) is None


def test_the_end_of_a_long_file_of_events_is_read_alone(run):
    writer = EventWriter(run.events, print)
    for step in range(1, 200):
        writer.append(Train(step=step, attempt=1))
    writer.close()
    last = stored_events_at_end(run.events, 2000)
    assert last[-1].step == 199 and 0 < len(last) < 50
    assert stored_events_at_end(run.monitor_events) == []
