"""The schema of events is what docs/events.md says."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.run.events import (
    COMMON,
    KINDS,
    SCHEMA,
    Decoder,
    Hang,
    OtherEvent,
    Recovered,
    Resumed,
    SteadyClock,
    Straggler,
    Train,
    decode,
    encode,
    is_repeated,
    resolve,
)

PAGE = Path(__file__).parents[3] / "docs" / "events.md"


def test_the_page_names_every_event_and_each_of_its_fields():
    sections = dict(re.findall(r"^### `(\w+)`\n(.*?)(?=^##|\Z)", PAGE.read_text(), re.M | re.S))
    documented = {name: set(re.findall(r"^\| `(\w+)`", text, re.M)) for name, text in sections.items()}
    assert documented.keys() == KINDS.keys()
    head = {*COMMON, "schema"}
    for name, kind in KINDS.items():
        assert kind(step=0).to_json().keys() == documented[name] | head, name
    common = PAGE.read_text().split("## ")[1]
    assert set(re.findall(r"^\| `(\w+)`", common, re.M)) == head


EXAMPLES = {
    "integer": 1,
    "number": 0.5,
    "text": "x",
    "mapping": {},
    "list": [],
    "list of text": ["x"],
    "list of integer": [1],
    "list of mapping": [{}],
    "true or false": True,
    "integer or null": None,
    "text or null": None,
}
WRONG = {name: {"x": []} if value == [] or value == {} else [[]] for name, value in EXAMPLES.items()}


def test_what_readers_take_for_granted_is_what_the_page_says():
    sections = dict(re.findall(r"^### `(\w+)`\n(.*?)(?=^##|\Z)", PAGE.read_text(), re.M | re.S))
    for name, text in sections.items():
        documented = dict(re.findall(r"^\| `(\w+)` \| ([\w ]+) \|", text, re.M))
        for field, kind in documented.items():
            event = {"time": 1.0, "event": name, "step": 1, "attempt": 1}
            (read,) = decode(line({**event, field: EXAMPLES[kind]}))
            assert type(read) is KINDS[name]
            assert kind == "list of mapping" or read.to_json()[field] == EXAMPLES[kind], (name, field)
            assert not decode(line({**event, field: WRONG[kind]})), (name, field)


def test_events_of_wrong_types_are_left_out_counted_and_told():
    right = {"time": 1.0, "event": "train", "step": 1, "attempt": 1}
    decoder = Decoder()
    found = list(decoder.events(map(line, [right, {**right, "loss": "low"}, {**right, "step": 0.5}, right])))
    assert found == 2 * [Train(time=1.0, step=1, attempt=1)] and decoder.left_out == 2
    assert decoder.note.startswith("2 events are left out, for loss of train is not of the type")
    assert not Decoder().note


def line(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields).encode() + b"\n"


def test_fields_and_events_of_a_newer_version_are_kept():
    newer = {"time": 1.0, "event": "train", "step": 1, "attempt": 1, "schema": SCHEMA + 1, "loss": 0.5, "joules": 7.5}
    (event,) = decode(line(newer))
    assert isinstance(event, Train) and event.loss == 0.5 and event.more == {"joules": 7.5}
    (event,) = decode(line({**newer, "event": "moved"}))
    assert isinstance(event, OtherEvent) and (event.name, event.more) == ("moved", {"loss": 0.5, "joules": 7.5})


def test_events_of_the_version_before_lack_a_schema_and_have_the_same_fields():
    old = {"time": 1.0, "event": "resumed", "step": 3, "attempt": 2, "rejected": [{"step": 4, "reason": "torn"}]}
    (event,) = decode(line(old))
    assert isinstance(event, Resumed) and event.path is None
    assert (event.rejected[0].step, event.rejected[0].reason) == (4, "torn")


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), plain, max_size=4))
def test_every_event_is_one_line_and_comes_back(fields):
    event = OtherEvent(time=1.5, called="x", step=3, attempt=1, more=fields)
    written = encode(event)
    assert written.count(b"\n") == 1
    assert written.endswith(b"\n")
    (read,) = decode(written)
    assert read.to_json().keys() == event.to_json().keys()


@given(st.binary(max_size=200))
def test_rubbish_in_a_file_costs_only_itself(rubbish):
    event = Train(time=1.0, step=1, attempt=1)
    assert event in decode(encode(event) + rubbish.replace(b"\n", b" ") + b"\n" + encode(event))


def test_numbers_that_json_does_not_know_become_null():
    (event,) = decode(encode(Train(step=1, loss=math.inf, more={"x": [math.nan]})))
    assert isinstance(event, Train)
    assert (event.loss, event.more) == (None, {"x": [None]})


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5)), min_size=1, max_size=4))
def test_whatever_the_interruptions_each_step_counts_once(attempts):
    """Attempt i starts at some step that an earlier one had reached and trains a few steps."""
    events, reached, clock = [], 0, 0.0
    for number, (back, length) in enumerate(attempts, start=1):
        start = max(0, reached - back)
        for name, step in [("run_started", start), *(("train", start + i + 1) for i in range(length))]:
            clock += 1
            events.append(KINDS[name](time=clock, step=step, attempt=number))
        reached = start + length
    steps = [event.step for event in resolve(events) if isinstance(event, Train)]
    assert steps == list(range(1, reached + 1))


@pytest.mark.parametrize("missing", COMMON)
def test_a_line_without_a_common_field_is_torn_and_not_counted(missing):
    fields = {"time": 1.0, "event": "train", "step": 1, "attempt": 1}
    del fields[missing]
    decoder = Decoder()
    assert not list(decoder.events([line(fields), b"[1]\n", b"{\n"])) and decoder.left_out == 0


@pytest.mark.parametrize(("field", "wrong"), [("time", "x"), ("step", -1), ("attempt", "1")])
def test_a_common_field_of_a_wrong_type_is_told(field, wrong):
    decoder = Decoder()
    fields = {"time": 1.0, "event": "train", "step": 1, "attempt": 1, "schema": 1}
    assert not list(decoder.events([line({**fields, field: wrong}), line({**fields, "loss": "low"})]))
    assert decoder.left_out == 2 and field in decoder.first, "the first of them is told"


def test_one_event_that_is_left_out_is_told_as_one():
    decoder = Decoder()
    list(decoder.events([line({"time": 1.0, "event": "train", "step": 1, "attempt": 1, "loss": "low"})]))
    assert decoder.note.startswith("an event is left out, for loss of train is not of the type")


@pytest.mark.parametrize("name", KINDS)
def test_what_an_event_holds_is_given_by_name_alone(name):
    """So that the fields of a newer version may stand anywhere."""
    with pytest.raises(TypeError, match="positional"):
        KINDS[name]("x", step=1)  # type: ignore[misc]


@pytest.mark.parametrize("name", KINDS)
def test_fields_that_are_missing_or_null_have_their_defaults(name):
    common = {"time": 1.0, "event": name, "step": 1, "attempt": 1}
    (bare,) = decode(line(common))
    assert bare == KINDS[name](time=1.0, step=1, attempt=1)
    (nulls,) = decode(line({**common, **dict.fromkeys(bare.to_json().keys() - common.keys() - {"schema"})}))
    assert nulls == bare


def test_an_event_of_an_unknown_kind_keeps_its_common_fields():
    (event,) = decode(line({"time": 1.0, "event": "moved", "step": 3, "attempt": 2, "to": "n2"}))
    assert event == OtherEvent(time=1.0, step=3, attempt=2, called="moved", more={"to": "n2"})
    assert (event.name, event.step, event.attempt, event.to_json()["to"]) == ("moved", 3, 2, "n2")


def test_further_fields_never_hide_those_of_the_kind():
    written = Train(time=1.0, step=3, attempt=1, loss=0.5, more={"loss": 9.0, "step": 9, "own": 1}).to_json()
    assert (written["loss"], written["step"], written["own"]) == (0.5, 3, 1)


def test_numbers_of_an_interval_are_those_that_were_measured():
    event = Train(step=1, loss=0.5, grad_norm=2.0, more={"accuracy": 0.75, "note": "x", "loss": 9.0, "flag": True})
    assert event.numbers() == {"loss": 0.5, "grad_norm": 2.0, "accuracy": 0.75}


def test_seconds_of_a_step_are_those_of_the_interval_over_its_steps():
    assert Train(step=8, steps=4, seconds={"data": 2.0, "forward": None}).seconds_per_step() == {"data": 0.5}
    for steps in (None, 0, 1):
        assert Train(step=8, steps=steps, seconds={"data": 2.0}).seconds_per_step() == {"data": 2.0}


def test_findings_that_brought_no_sentence_are_told_all_the_same():
    assert Straggler(step=1, rank=3, host="n1", cause="data").text == "rank 3 on n1: data"
    assert Straggler(step=1, sentence="rank 3 is slow").text == "rank 3 is slow"
    assert Recovered(step=1).text == "recovered: the attempt before had failed"
    assert Recovered(step=1, reason="n1 died", seconds=2.0).text == "recovered after 2.0 s: n1 died"
    assert (Hang(step=1).text, Hang(step=1, sentence="rank 3 hangs").text) == ("no rank moves", "rank 3 hangs")


def test_a_step_counts_again_only_beyond_where_a_later_attempt_took_over():
    train = Train(time=1.0, step=5, attempt=2)
    assert is_repeated(train, {3: 4}) and not is_repeated(train, {3: 5})
    assert not is_repeated(train, {2: 0}) and not is_repeated(train, {1: 0})
    assert not is_repeated(Hang(time=1.0, step=5, attempt=2), {3: 0}), "what happened has happened"


def test_events_are_of_one_line_each_whose_separators_people_can_read():
    written = encode(Train(time=1.0, step=1, attempt=1, loss=0.5))
    assert written.startswith(b'{"time": 1.0, "event": "train", "step": 1, "attempt": 1, "schema": 1')


def test_times_do_not_decrease_if_the_clock_is_set_back(monkeypatch):
    """``explain`` named an old checkpoint as the newest one, and a run took a negative time."""
    clock, times = SteadyClock(), [100.0, 101.0, 41.0, 42.0, 102.0, 10.0, 200.0]
    monkeypatch.setattr("time.time", lambda: times.pop(0))
    assert [clock() for _ in times.copy()] == [100.0, 101.0, 101.0, 102.0, 162.0, 162.0, 352.0]
