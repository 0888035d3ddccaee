"""The run folder: attempts and their fence, events that survive crashes, resumes and full disks."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import threading

import pytest

from hpctrain.errors import Code, ExitCode, Replaced, UserError
from hpctrain.run import attempts, last_words
from hpctrain.run.attempts import Attempt, Attempts, git_commit
from hpctrain.run.event_log import EventWriter, read_events
from hpctrain.run.events import Event, Resumed, RunStarted, Straggler, Train
from hpctrain.run.folder import RunDir
from hpctrain.run.stop_request import BY_PERSON, StopRequest, request_stop, requested_stop
from hpctrain.run.verdict import Action, RunVerdict
from tests.support.programs import on_path


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
    assert RunDir.of("a").path == tmp_path / "runs" / "a"
    assert RunDir.of("a", str(tmp_path / "x")).path == tmp_path / "x"


def test_a_folder_that_cannot_be_made_is_the_users_matter(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be made"):
        RunDir(tmp_path / "file" / "run").create()


def test_an_attempt_says_from_its_beginning_what_it_is(run_dir):
    Attempts(run_dir).begin(Attempt(ranks=2, job="7_1"), "name: a\n")
    assert run_dir.run_yaml.read_text() == "name: a\n"
    (entry,) = Attempts(run_dir).info()["attempts"]
    assert (entry["attempt"], entry["ranks"], entry["job"], entry["from_step"]) == (1, 2, "7_1", None)
    assert entry["host"] == socket.gethostname() and "hpctrain" in entry["versions"] and "git_commit" in entry
    assert not {"to_step", "ended", "verdict", "nodes"} & entry.keys()


def test_the_commit_is_known_from_any_git_without_taking_its_lock(tmp_path, monkeypatch):
    """git before 2.15 has no option for that."""
    git = 'case $1 in rev-parse) echo abc;; status) [ "$GIT_OPTIONAL_LOCKS" = 0 ] || echo locked;; *) exit 129;; esac'
    on_path(tmp_path, monkeypatch, git=git)
    assert git_commit() == "abc"


def test_versions_of_packages_are_read_once(monkeypatch):
    """Each run wrote them three times, from the metadata of eight packages."""
    attempts.versions.cache_clear()
    read = []
    monkeypatch.setattr(attempts, "version_of", lambda name: read.append(name) or "1")
    assert attempts.versions() == attempts.versions() and sorted(read) == sorted(attempts.PACKAGES)
    attempts.versions.cache_clear()


def test_attempts_count_up_and_fence_off_older_ones(run_dir):
    assert [Attempts(run_dir).begin(Attempt(ranks=2)), Attempts(run_dir).begin(Attempt(ranks=4))] == [1, 2]
    assert [attempt.ranks for attempt in Attempts(run_dir).all()] == [2, 4]
    Attempts(run_dir).check_fence(2)
    with pytest.raises(Replaced, match="replaced by attempt 2"):
        Attempts(run_dir).check_fence(1)


def test_concurrent_attempts_get_different_numbers(run_dir):
    numbers: list[int] = []
    threads = [threading.Thread(target=lambda: numbers.append(Attempts(run_dir).begin())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(numbers) == list(range(1, 9))


def test_a_new_attempt_forgets_an_old_stop_request(run_dir):
    request_stop(run_dir, StopRequest.of_signal(signal.SIGUSR1))
    request_stop(run_dir, StopRequest("someone"))
    request_stop(run_dir, StopRequest("someone later"))
    assert requested_stop(run_dir) == StopRequest("someone"), "a person's wish, and the first one's"
    Attempts(run_dir).begin()
    assert requested_stop(run_dir) is None


def test_the_end_of_an_attempt_says_how_far_it_came(run_dir):
    Attempts(run_dir).begin()
    (run_dir.checkpoints / "step-000000012").mkdir()
    (run_dir.checkpoints / "step-000000012" / "manifest.json").write_text("{}")
    (run_dir.checkpoints / "step-000000099").mkdir()
    verdict = RunVerdict(Action.DONE, ExitCode.DONE, "done", code=Code.COMPLETED)
    Attempts(run_dir).end(1, verdict, [])
    entry = Attempts(run_dir).all()[0]
    assert (entry.from_step, entry.to_step, entry.verdict) == (None, 12, verdict)


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
    assert Attempts(run_dir).info() == {}
    assert last_words.read(run_dir, 1) is None
    assert run_dir.newest_checkpoint_step() is None


@pytest.mark.parametrize(("error", "expected"), [(errno.EACCES, BY_PERSON), (errno.ESTALE, None), (errno.EIO, None)])
def test_a_stop_file_that_cannot_be_read_ends_no_supervisor(run_dir, monkeypatch, error, expected):
    def refused(*_, **__):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "open", refused)
    assert requested_stop(run_dir) == expected


@pytest.mark.parametrize("content", ["{", "[]", '{"fence": "x"}', '{"attempts": 1}', '{"attempts": [{"ended": 1}]}'])
def test_damaged_identity_is_said(run_dir, content):
    run_dir.run_json.write_text(content)
    with pytest.raises(UserError, match="damaged"):
        Attempts(run_dir).info()


@pytest.mark.parametrize(
    ("content", "by", "signal_number"),
    [
        ("", "STOP file", None),
        ("ada\n", "ada", None),
        ("signal SIGTERM\n", "signal SIGTERM", None),
        ('signal SIGUSR1\n{"signal": "SIGUSR1"}\n', "signal SIGUSR1", signal.SIGUSR1),
        ('{"signal": "SIGUSR1"}\n', '{"signal": "SIGUSR1"}', None),
        ('ada\n{"signal": "SIGNOTHING"}\n', 'ada {"signal": "SIGNOTHING"}', None),
        ('ada\n{"signal": 1}\n', 'ada {"signal": 1}', None),
        ("ada\n[]\n", "ada []", None),
    ],
)
def test_only_a_process_writes_a_signals_request(run_dir, content, by, signal_number):
    run_dir.stop_file.write_text(content)
    assert requested_stop(run_dir) == StopRequest(by, signal_number)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGUSR1, Code.TIME_LIMIT), (signal.SIGTERM, Code.STOPPED)])
def test_a_signals_request_says_why(run_dir, number, code):
    request_stop(run_dir, StopRequest.of_signal(number))
    found = requested_stop(run_dir)
    assert found == StopRequest.of_signal(number) and found.code is code
