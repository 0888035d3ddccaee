"""A run folder with links in it, such as one that somebody hands on: to resume it changes nothing elsewhere."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from hpctrain.errors import ExitCode, HpctrainError, RunFailed, UserError
from hpctrain.launch.attempt import Launch, Limits
from hpctrain.launch.engines.slurm.probe import write_problem
from hpctrain.launch.supervisor import supervise
from hpctrain.run.attempts import Attempt
from hpctrain.run.event_log import EventWriter
from hpctrain.run.events import Train
from hpctrain.run.folder import RunDir
from hpctrain.run.last_words import WordFile, first_word, merge, note_death, read
from hpctrain.run.live_lock import LiveLock, myself
from hpctrain.run.rank_environment import ATTEMPT, RUN_DIR
from hpctrain.run.stop_request import StopRequest, request_stop, requested_stop
from hpctrain.run.verdict import Action, RunVerdict

SIGNAL = 'signal processing, a thesis\n{"signal": "SIGTERM"}\n'
TEXT = '{"ending": "years of work"}\n'


@pytest.fixture
def thesis(tmp_path: Path) -> Path:
    """A folder of the user's own that has nothing to do with runs."""
    folder = tmp_path / "thesis"
    folder.mkdir()
    (folder / "chapter.json").write_text(TEXT)
    return folder


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run folder as hpctrain makes it."""
    run = RunDir(tmp_path / "run")
    run.create()
    return run


def is_untouched(thesis: Path) -> bool:
    return [path.name for path in thesis.iterdir()] == ["chapter.json"] and (
        thesis / "chapter.json"
    ).read_text() == TEXT


def start(run: RunDir) -> None:
    """One attempt, from taking the folder to the verdict."""
    supervise(run, lambda number: Launch(["true"], {}, 1), Limits(), Attempt(), "name: x\n")


def test_words_of_an_attempt_are_not_removed_behind_a_link(run, thesis):
    (run.ranks / "1").symlink_to(thesis)
    start(run)
    assert read(run, 1), "the attempt has its verdict"
    with pytest.raises(RunFailed, match="ranks/1 is a link"):
        WordFile.of(run, 1, first_word(0)).begin(first_word(0))
    WordFile.of(run, 1, first_word(0)).end(first_word(0))
    merge(run, 1, [], RunVerdict(Action.DONE, ExitCode.DONE, ""))
    assert is_untouched(thesis)


def test_a_word_is_not_written_through_a_link(run, thesis):
    word = first_word(0)
    file = WordFile.of(run, 1, word)
    file.path.parent.mkdir()
    file.path.symlink_to(thesis / "chapter.json")
    file.begin(word)
    assert json.loads(file.path.read_text())["pid"] == os.getpid()
    file.path.unlink()
    file.path.symlink_to(thesis / "chapter.json")
    file.end(word)
    assert is_untouched(thesis)


@pytest.mark.parametrize("name", ["ranks", "logs", "monitor", "checkpoints"])
def test_a_folder_of_a_run_that_is_a_link_is_refused_before_anything_is_written(name, run, thesis):
    (run.path / name).rmdir()
    (run.path / name).symlink_to(thesis)
    with pytest.raises(UserError, match=f"{name} is a link, which is not followed here"):
        start(run)
    assert is_untouched(thesis) and not run.lock_file.exists() and not run.run_json.exists()


@pytest.mark.parametrize("name", ["attempts", "locks"])
def test_numbers_are_not_taken_behind_a_link(name, run, thesis):
    (run.path / name).symlink_to(thesis)
    with pytest.raises(HpctrainError, match=f"{name} is a link"):
        start(run)
    assert is_untouched(thesis)


def test_no_file_of_a_run_is_written_through_a_link(run, thesis, monkeypatch):
    """The names that a run writes to are to be known in advance."""
    monkeypatch.setenv(RUN_DIR, str(run.path))
    monkeypatch.setenv(ATTEMPT, "1")
    links = (run.events, run.monitor_events, run.stop_file, run.run_yaml, run.lock_file, run.words(1))
    (run.path / "attempts").mkdir()
    told: list[str] = []
    host = socket.gethostname()
    more = (run.log("launcher", 1), run.monitor / f"deaths-1-{host}.txt", run.path / f".clock.{host}.{os.getpid()}")
    for path in (*links, *more, run.path / "attempts" / "2.json"):
        path.symlink_to(thesis / "chapter.json")
    for path in (run.events, run.monitor_events):
        writer = EventWriter(path, told.append)
        writer.append(Train(step=1))
        writer.close()
        assert "events.jsonl is a link" in told[-1]
    request_stop(run, StopRequest("someone"))
    note_death(0)
    with LiveLock(run, myself()).held():
        pass
    start(run)
    assert is_untouched(thesis)


def test_a_stop_that_replaces_that_of_a_signal_is_not_written_through_a_link(run, thesis):
    (thesis / "chapter.json").write_text(SIGNAL)
    run.stop_file.symlink_to(thesis / "chapter.json")
    request_stop(run, StopRequest("someone"))
    assert requested_stop(run) == StopRequest("someone")
    assert (thesis / "chapter.json").read_text() == SIGNAL


def test_preflight_overwrites_nothing_in_shared_scratch(tmp_path, thesis):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    guessed = scratch / f".hpctrain-probe-{socket.gethostname()}-{os.getpid()}"
    guessed.symlink_to(thesis / "chapter.json")
    assert write_problem("scratch", scratch) == {"scratch_error": None}
    assert list(scratch.iterdir()) == [guessed] and is_untouched(thesis)
    assert "No such file" in str(write_problem("scratch", tmp_path / "missing"))
