"""RunView: the whole of a run folder at once, or what is new in it."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpctrain
from hpctrain.run.attempts import Attempts
from hpctrain.run.event_log import EventWriter
from hpctrain.run.events import CheckpointSaved, Eval, Event, Resumed, RunStarted, Train
from hpctrain.run.folder import RunDir
from hpctrain.run.last_words import WordFile, first_word
from hpctrain.run.run_status import Outcome, Word
from hpctrain.run.run_view import RunView
from hpctrain.run.stop_request import StopRequest, request_stop


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run of two ranks that was killed at step 30 and resumed from step 20."""
    monkeypatch.delenv("HPCTRAIN_ATTEMPT", raising=False)
    run = RunDir(tmp_path / "wave")
    run.create()
    run.run_yaml.write_text("name: wave\ntrain: {epochs: 2}\n")
    (run.checkpoints / "step-000000020").mkdir()
    (run.checkpoints / "step-000000020" / "manifest.json").write_text("{}")
    entries = [
        {"attempt": 1, "started": 100.0, "ranks": 2, "hosts": ["n1"]},
        {"attempt": 2, "started": 200.0, "ranks": 2, "from_step": 20},
    ]
    run.run_json.write_text(json.dumps({"id": "a" * 32, "fence": 2, "attempts": entries}))
    write(
        run,
        RunStarted(time=101.0, step=0, ranks=2, total_steps=100),
        *(Train(time=101.0 + step, step=step, loss=1.0, steps=10) for step in (10, 20, 30)),
        Eval(time=131.5, step=30, metrics={"accuracy": 0.25}),
        CheckpointSaved(time=121.5, step=20, path="x"),
        Resumed(time=201.0, step=20, attempt=2),
        Train(time=211.0, step=30, attempt=2, loss=0.5, steps=10),
    )
    return run


def write(run: RunDir, *events: Event) -> None:
    writer = EventWriter(run.events, print)
    for event in events:
        writer.append(event)


def test_a_run_that_began_again_is_the_new_one_only(run):
    info = json.loads(run.run_json.read_text())
    info["attempts"] += [{"attempt": 3, "started": 300.0, "fresh": True}, {"attempt": 4, "started": 320.0}]
    run.run_json.write_text(json.dumps(info))
    write(
        run,
        RunStarted(time=301.0, step=0, attempt=3),
        Train(time=311.0, step=10, attempt=3, steps=10, seconds={"forward": 0.5}),
    )
    view = RunView(run.path)
    for found in (view.snapshot(), view.history().run):
        assert [attempt.number for attempt in found.attempts] == [3, 4]
        assert (found.account.wall_s, found.account.steps_s) == (11.0, 0.5)
    assert [attempt.number for attempt in Attempts(run).all()] == [3, 4]


def test_a_snapshot_holds_all_that_the_folder_tells(run):
    request_stop(run, StopRequest("ada@login"))
    WordFile.of(run, 2, first_word(0)).begin(first_word(0))
    found = hpctrain.RunView(run.path).snapshot()
    assert (found.name, found.path, found.id) == ("wave", run.path, "a" * 32)
    assert [(attempt.number, attempt.started, attempt.from_step) for attempt in found.attempts] == [
        (1, 100.0, None),
        (2, 200.0, 20),
    ]
    assert found.attempts[0].hosts == ("n1",)
    assert (found.progress.step, found.progress.total_steps, found.progress.attempt) == (30, 100, 2)
    assert (found.checkpoint_step, found.stop_requested_by) == (20, "ada@login")
    assert [word.rank for word in found.words[2].ranks] == [0] and 1 not in found.words
    assert found.outcome is Outcome.RUNNING, "nobody wrote an end"
    assert found.state(now=300.0).word is Word.UNKNOWN, "and nobody is at work"


def test_a_snapshot_stays_as_it_is_when_the_run_goes_on(run):
    view = RunView(run.path)
    before = view.look()
    write(run, Train(time=221.0, step=40, attempt=2, loss=0.25, steps=10))
    after = view.look()
    assert (before.progress.step, after.progress.step) == (30, 40)
    with pytest.raises(FrozenInstanceError):
        before.id = "another"  # type: ignore[misc]


def test_a_long_history_is_read_in_portions(run):
    filler = [Train(time=300.0 + step, step=step, attempt=2, more={"x": "y" * 2000}) for step in range(31, 2000)]
    write(run, *filler)
    view = RunView(run.path)
    first = view.look(within_s=0.0)
    assert first.is_behind and (first.progress.step or 0) < 1999
    last = view.look()
    assert not last.is_behind and last.progress.step == 1999


def test_a_history_counts_steps_once_and_knows_what_the_snapshot_knows(run):
    found = RunView(run.path).history()
    assert found.train["loss"].step.tolist() == [10, 20, 30] and found.train["loss"].value.tolist() == [1, 1, 0.5]
    assert not found.metrics, "the evaluation was of a step that was computed again"
    assert (found.run.checkpoint_step, found.run.progress.step, found.counts["train"]) == (20, 30, 4)
    saved = found.last(CheckpointSaved)
    assert saved is not None and saved.path == "x" and found.last(Eval) is None


def test_readers_that_keep_their_place_get_each_event_once(run):
    view = RunView(run.path)
    first, place = view.events_from(0, 200)
    rest, end = view.events_from(place, 1 << 20)
    assert first and len(first) + len(rest) == 8
    assert view.events_from(end, 1 << 20) == ([], end)
    run.events.write_bytes(b"")
    write(run, RunStarted(time=1.0, step=0))
    again, place = view.events_from(end, 1 << 20)
    assert [type(event) for event in again] == [RunStarted], "another run in the same place"
    assert view.events_from(place, 1 << 20) == ([], place)


def test_a_folder_that_is_not_there_is_a_run_that_has_not_started(tmp_path):
    view = RunView(tmp_path / "wave")
    found = view.snapshot()
    assert (found.name, found.attempts, found.outcome) == ("wave", (), Outcome.UNKNOWN)
    assert found.state(now=0.0).word is Word.NOT_STARTED
    assert view.events() == [] and view.heat_map() is None and view.records() == []


@pytest.mark.parametrize("damage", ["", "{", "[1]", '{"attempts": 7}'])
def test_damaged_records_hide_nothing_else(run, damage):
    for path in (run.run_json, run.run_yaml, run.live_view, run.heat_map, run.lock_file):
        path.write_text(damage)
    found = RunView(run.path).history().run
    assert (found.progress.step, found.checkpoint_step, found.attempts) == (30, 20, ())


def test_the_heat_map_is_that_of_the_monitor(run):
    values: Any = np.array([[0.0, 0.5], [0.25, np.nan]], dtype=np.float16)
    np.savez_compressed(run.heat_map, excess=values)
    found = RunView(run.path).heat_map()
    assert found is not None and found.dtype == np.float64
    np.testing.assert_array_equal(found, values.astype(np.float64))
