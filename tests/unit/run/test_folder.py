"""The run folder: attempts and their fence, events that survive crashes, resumes and full disks."""

from __future__ import annotations

import errno
import json
import os
import threading

import pytest

from hpctrain.config.sections import Config, TrainConfig
from hpctrain.errors import Replaced, UserError
from hpctrain.run.event_log import EventWriter, read_events
from hpctrain.run.events import Event, Resumed, RunStarted, Straggler, Train
from hpctrain.run.folder import RunDir


@pytest.fixture
def run_dir(tmp_path, monkeypatch) -> RunDir:
    monkeypatch.delenv("HPCTRAIN_ATTEMPT", raising=False)
    made = RunDir(tmp_path / "run")
    made.create()
    return made


def append(run_dir: RunDir, event: Event) -> None:
    """As rank 0 does."""
    EventWriter(run_dir.events, print).append(event)


def test_the_folder_is_named_by_the_run_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train = TrainConfig(steps=1, global_batch=1)
    assert RunDir.for_config(Config("a", "m:f", train)).path == tmp_path / "runs" / "a"
    assert RunDir.for_config(Config("a", "m:f", train, run_dir=str(tmp_path / "x"))).path == tmp_path / "x"


def test_a_folder_that_cannot_be_made_is_the_users_matter(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be made"):
        RunDir(tmp_path / "file" / "run").create()


def test_attempts_count_up_and_fence_off_older_ones(run_dir):
    assert [run_dir.begin_attempt(ranks=2), run_dir.begin_attempt(ranks=4)] == [1, 2]
    assert [entry["ranks"] for entry in run_dir.attempts()] == [2, 4]
    run_dir.check_fence(2)
    with pytest.raises(Replaced, match="replaced by attempt 2"):
        run_dir.check_fence(1)


def test_concurrent_attempts_get_different_numbers(run_dir):
    numbers: list[int] = []
    threads = [threading.Thread(target=lambda: numbers.append(run_dir.begin_attempt())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(numbers) == list(range(1, 9))


def test_a_new_attempt_forgets_an_old_stop_request(run_dir):
    run_dir.request_stop("signal USR1")
    run_dir.request_stop("someone")
    run_dir.request_stop("someone later")
    assert run_dir.stop_requested_by() == "someone", "a person's wish, and the first one's"
    run_dir.begin_attempt()
    assert run_dir.stop_requested_by() is None


def test_the_end_of_an_attempt_says_how_far_it_came(run_dir):
    run_dir.begin_attempt()
    (run_dir.checkpoints / "step-000000012").mkdir()
    (run_dir.checkpoints / "step-000000012" / "manifest.json").write_text("{}")
    (run_dir.checkpoints / "step-000000099").mkdir()
    run_dir.end_attempt(1, verdict={"action": "done"})
    entry = run_dir.attempts()[0]
    assert (entry["from_step"], entry["to_step"], entry["verdict"]) == (None, 12, {"action": "done"})


def test_events_of_both_files_come_merged_by_time(run_dir):
    append(run_dir, RunStarted(step=0))
    EventWriter(run_dir.monitor_events, print).append(Straggler(step=1, rank=1))
    append(run_dir, Train(step=2, loss=float("nan")))
    first, second, third = read_events(run_dir)
    assert isinstance(first, RunStarted) and isinstance(second, Straggler) and isinstance(third, Train)
    assert third.loss is None
    assert all(json.loads(line) for line in run_dir.events.read_text().splitlines())


def test_a_line_torn_by_a_crash_costs_only_itself(run_dir):
    append(run_dir, Train(step=1, loss=1.0))
    with open(run_dir.events, "ab") as file:
        file.write(b'{"time": 1.0, "event": "tra')
    assert [event.step for event in read_events(run_dir)] == [1]
    append(run_dir, Train(step=2, loss=1.0))
    assert [event.step for event in read_events(run_dir)] == [1, 2]


def test_steps_computed_again_after_a_resume_count_once(run_dir, monkeypatch):
    append(run_dir, RunStarted(step=0))
    for step in (10, 20, 30):
        append(run_dir, Train(step=step, loss=float(step)))
    monkeypatch.setenv("HPCTRAIN_ATTEMPT", "2")
    append(run_dir, Resumed(step=10, path="checkpoints/step-000000010"))
    append(run_dir, RunStarted(step=10))
    append(run_dir, Train(step=20, loss=0.5))
    trained = [(event.step, event.attempt) for event in read_events(run_dir) if isinstance(event, Train)]
    assert trained == [(10, 1), (20, 2)]


def test_a_partial_folder_reads_as_empty(tmp_path):
    run_dir = RunDir(tmp_path / "nothing")
    assert read_events(run_dir) == []
    assert run_dir.info() == {}
    assert run_dir.read_words(1) == {}
    assert run_dir.newest_checkpoint_step() is None


@pytest.mark.parametrize(("error", "expected"), [(errno.EACCES, "STOP file"), (errno.ESTALE, None), (errno.EIO, None)])
def test_a_stop_file_that_cannot_be_read_ends_no_supervisor(run_dir, monkeypatch, error, expected):
    def refused(*_: object, **__: object) -> int:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "open", refused)
    assert run_dir.stop_requested_by() == expected


@pytest.mark.parametrize("content", ["{", "[]", '{"fence": "x"}', '{"attempts": 1}', '{"attempts": [{"ended": 1}]}'])
def test_damaged_identity_is_said(run_dir, content):
    run_dir.run_json.write_text(content)
    with pytest.raises(UserError, match="damaged"):
        run_dir.info()
