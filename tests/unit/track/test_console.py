"""What the user sees."""

from __future__ import annotations

import dataclasses
import io

import pytest

from hpctrain.run.events import CheckpointSaved, Eval, Hang, RunFinished, RunStarted, Train
from hpctrain.track.console import BarConsole, PlainConsole, describe, make_console, number
from hpctrain.track.sinks import LoggingSink

STARTED = RunStarted(step=0, ranks=2, hosts=("n1", "n2"), framework="torch", reducer="mpi", total_steps=8)


def train(step: int) -> Train:
    return Train(step=step, loss=0.5, lr=1.0, samples_per_s=123.4, total_steps=8)


def test_stages_are_told_with_their_layers():
    told = describe(dataclasses.replace(STARTED, layers=(3, 5)))
    assert told == "2 ranks on n1, n2: torch, reducer mpi, stages of 3 + 5 layers, 8 steps"


def test_a_batch_log_gets_plain_lines():
    stream = io.StringIO()
    console = make_console(0, stream)
    for event in (STARTED, train(4), train(8), Eval(step=8, metrics={"accuracy": 0.9753})):
        console.event(event)
    console.close()
    lines = stream.getvalue().splitlines()
    assert lines[0] == "2 ranks on n1, n2: torch, reducer mpi, 8 steps"
    assert lines[-2:] == ["step 8/8  loss 0.5  lr x1  123.4 samples/s", "step 8  validation: accuracy 0.9753"]
    assert "\x1b" not in stream.getvalue()


def test_the_learning_rate_itself_is_shown_where_it_is_known():
    known = dataclasses.replace(train(8), lr=0.5, learning_rate=1.5e-4)
    assert describe(known) == "step 8/8  loss 0.5  lr 0.00015  123.4 samples/s"
    metered = dataclasses.replace(known, more={"accuracy": 0.75, "label": "no number"})
    assert describe(metered) == "step 8/8  loss 0.5  accuracy 0.75  lr 0.00015  123.4 samples/s"


def test_a_run_that_was_complete_says_how_to_go_on():
    ended = RunFinished(step=8, reason="completed", steps=8, seconds=2.0)
    assert describe(ended) == "completed at step 8, 8 steps in 2.0 s"
    again = describe(dataclasses.replace(ended, steps=0))
    assert again == "already completed at step 8: --train.epochs N trains further, --fresh starts over"
    assert describe(dataclasses.replace(ended, steps=0, reason="stop_requested")).startswith("stop requested at step 8")


def test_fast_steps_do_not_flood_a_log_but_the_last_one_is_shown():
    stream = io.StringIO()
    console = PlainConsole(stream)
    for step in range(1, 9):
        console.event(train(step))
    assert [line.split()[1] for line in stream.getvalue().splitlines()] == ["1/8", "8/8"]


def test_a_console_that_is_gone_does_not_end_the_run():
    stream = io.StringIO()
    stream.close()
    console = PlainConsole(stream)
    console.event(STARTED)
    console.event(train(8))
    console.stream.close()


def test_a_terminal_gets_a_bar():
    stream = io.StringIO()
    console = make_console(100, stream)
    assert isinstance(console, BarConsole)
    for event in (STARTED, train(4), train(8)):
        console.event(event)
    console.close()
    assert "8/8" in stream.getvalue()
    assert "loss 0.5" in stream.getvalue()


@pytest.mark.parametrize("name", ["top[/5]", "f1[cat]"])
def test_a_terminal_takes_names_as_they_are(name):
    stream = io.StringIO()
    console = make_console(100, stream)
    console.event(Eval(step=8, metrics={name: 0.5}))
    assert f"{name} 0.5" in stream.getvalue()


def test_a_terminal_is_left_alone_if_the_run_never_started():
    stream = io.StringIO()
    make_console(80, stream).close()
    assert stream.getvalue().strip() in ("", "\x1b[?25h")


def test_numbers_read_well():
    assert [number(value) for value in (None, float("nan"), 0.123456, 123456.7)] == ["nan", "nan", "0.1235", "123,457"]


def test_events_that_say_nothing_to_a_person_give_no_line():
    assert describe(CheckpointSaved(step=1)) == ""


def test_a_name_that_the_encoding_lacks_does_not_silence_the_log():
    raw = io.BytesIO()
    console = PlainConsole(io.TextIOWrapper(raw, encoding="latin-1"))
    console.event(Eval(step=1, metrics={"\u0442\u043e\u0447\u043d\u043e\u0441\u0442\u044c": 0.5}))
    console.event(Eval(step=2, metrics={"loss": 0.25}))
    assert raw.getvalue().startswith(b"step 1  validation: \\u0442")
    assert raw.getvalue().endswith(b"step 2  validation: loss 0.25\n")


def test_events_are_records_of_logging(caplog):
    sink = LoggingSink()
    with caplog.at_level("DEBUG", "hpctrain"):
        for event in (
            Train(step=10, loss=0.5, lr=1.0, samples_per_s=2.0, steps=10),
            CheckpointSaved(step=10),
            Hang(step=11),
        ):
            sink.event(event)
    levels = [(record.name, record.levelname, record.event["event"]) for record in caplog.records]
    names = ("INFO", "train"), ("DEBUG", "checkpoint_saved"), ("WARNING", "hang")
    assert levels == [("hpctrain.run", *each) for each in names]
    assert caplog.records[0].getMessage().startswith("step 10  loss 0.5")
