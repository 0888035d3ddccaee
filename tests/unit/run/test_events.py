"""The schema of events is what docs/events.md says."""

from __future__ import annotations

import math
import re
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from hpctrain.run.events import COMMON, FIELDS, TYPES, Decoder, decode, encode, missing_fields, resolve

PAGE = Path(__file__).parents[3] / "docs" / "events.md"


def test_the_page_names_every_event_and_each_of_its_fields():
    sections = dict(re.findall(r"^### `(\w+)`\n(.*?)(?=^##|\Z)", PAGE.read_text(), re.M | re.S))
    documented = {name: set(re.findall(r"^\| `(\w+)`", text, re.M)) for name, text in sections.items()}
    assert documented.keys() == FIELDS.keys()
    for name, fields in FIELDS.items():
        assert set(fields) <= documented[name], name
    common = PAGE.read_text().split("## ")[1]
    assert set(re.findall(r"^\| `(\w+)`", common, re.M)) == set(COMMON)


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
        assert documented.keys() == TYPES[name].keys(), name
        for field, kind in documented.items():
            event = {"time": 1.0, "event": name, "step": 1, "attempt": 1}
            assert list(Decoder().events([encode({**event, field: EXAMPLES[kind]})])), (name, field)
            assert not list(Decoder().events([encode({**event, field: WRONG[kind]})])), (name, field)


def test_events_of_wrong_types_are_left_out_counted_and_told():
    right = {"time": 1.0, "event": "train", "step": 1, "attempt": 1}
    decoder = Decoder()
    found = list(decoder.events(map(encode, [right, {**right, "loss": "low"}, {**right, "step": 0.5}, right])))
    assert found == [right, right] and decoder.left_out == 2
    assert decoder.note.startswith("2 events are left out, for loss of train is not of the type")
    assert not Decoder().note


def test_missing_fields_are_named():
    event = {"time": 1.0, "event": "eval", "step": 1, "attempt": 1}
    assert missing_fields(event) == ["metrics"]
    assert missing_fields({**event, "metrics": {}}) == []
    assert missing_fields({"event": "unheard of"}) == ["time", "step", "attempt"]


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), plain, max_size=4))
def test_every_event_is_one_line_and_comes_back(fields):
    event = {**fields, "time": 1.5, "event": "x", "step": 3, "attempt": 1}
    line = encode(event)
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    (read,) = decode(line)
    assert read.keys() == event.keys()


@given(st.binary(max_size=200))
def test_rubbish_in_a_file_costs_only_itself(rubbish):
    event = {"time": 1.0, "event": "train", "step": 1, "attempt": 1}
    assert event in decode(encode(event) + rubbish.replace(b"\n", b" ") + b"\n" + encode(event))


def test_numbers_that_json_does_not_know_become_null():
    event = {"time": 0.0, "event": "train", "step": 1, "attempt": 1, "loss": math.inf, "x": [math.nan]}
    (event,) = decode(encode(event))
    assert (event["loss"], event["x"]) == (None, [None])


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5)), min_size=1, max_size=4))
def test_whatever_the_interruptions_each_step_counts_once(attempts):
    """Attempt i starts at some step that an earlier one had reached and trains a few steps."""
    events, reached, clock = [], 0, 0.0
    for number, (back, length) in enumerate(attempts, start=1):
        start = max(0, reached - back)
        for name, step in [("run_started", start), *(("train", start + i + 1) for i in range(length))]:
            clock += 1
            events.append({"time": clock, "event": name, "step": step, "attempt": number})
        reached = start + length
    steps = [event["step"] for event in resolve(events) if event["event"] == "train"]
    assert steps == list(range(1, reached + 1))
