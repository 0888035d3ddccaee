"""What trackers' processes send, and what they take for sent."""

from __future__ import annotations

import json
import os
import shutil
from typing import Any

from hpctrain.run.attempts import Attempts
from hpctrain.run.event_log import EventWriter
from hpctrain.run.events import Train
from hpctrain.run.folder import RunDir
from hpctrain.system import python
from hpctrain.track.events_hook import EventsHook
from hpctrain.track.follower import FollowerSink, follow, has_unsent, shown
from hpctrain.track.wandb import WandbFollower
from hpctrain.train.clock import IntervalClock


class Library:
    """Stands for wandb: what it was given, and whether it ends."""

    def __init__(self, ends: bool) -> None:
        self.ends = ends
        self.logged: list[int] = []
        self.summary: dict[str, Any] = {}

    def init(self, **given: Any) -> Library:
        return self

    def log(self, values: dict[str, float], step: int) -> None:
        self.logged.append(step)

    def finish(self) -> None:
        if not self.ends:
            raise ConnectionError("the server is away")


def test_what_wandb_has_not_confirmed_is_sent_again(tmp_path):
    writer = EventWriter(RunDir(tmp_path).events, print)
    for step in (1, 2, 3):
        writer.append(Train(step=step, loss=0.5))
    for ends in (False, True):
        library = Library(ends)
        assert follow(WandbFollower(RunDir(tmp_path), library, "project"), lambda seconds: True) is ends
        assert library.logged == [1, 2, 3]
        assert has_unsent(RunDir(tmp_path), "wandb") is not ends
    assert json.loads((tmp_path / "wandb.json").read_bytes())["run_id"]
    library = Library(True)
    assert follow(WandbFollower(RunDir(tmp_path), library, "project"), lambda seconds: True)
    assert not library.logged


def test_a_copied_run_begins_a_run_of_its_own_in_a_tracker(tmp_path):
    """It continued that of the original."""
    run = RunDir(tmp_path / "run")
    run.create()
    Attempts(run).begin()
    EventWriter(run.events, print).append(Train(step=1, loss=0.5))
    assert follow(WandbFollower(run, Library(True), "project"), lambda seconds: True)
    copy = RunDir(shutil.copytree(run.path, tmp_path / "copy"))
    Attempts(copy).begin()
    library = Library(True)
    assert follow(WandbFollower(copy, library, "project"), lambda seconds: True)
    runs = {json.loads((one.path / "wandb.json").read_bytes())["run_id"] for one in (run, copy)}
    assert runs == {Attempts(one).info()["id"] for one in (run, copy)} and len(runs) == 2 and library.logged == [1]


def test_the_environment_of_ranks_is_not_told():
    config = {"name": "digits", "launch": {"nodes": 2, "env": {"TOKEN": "secret"}}}
    assert shown(config) == {"name": "digits", "launch": {"nodes": 2}}


def test_trackers_end_side_by_side(tmp_path, monkeypatch):
    """Each ends once the other one has been told that the run is over."""
    for name in ("one", "other"):
        os.mkfifo(tmp_path / name)
    run_dir = RunDir(tmp_path / "run")
    run_dir.logs.mkdir(parents=True)
    meets = 'cat > /dev/null; : > "$1" & exec cat "$2"'
    monkeypatch.setattr(python, "module", lambda name, run, mine, its: ["sh", "-c", meets, name, mine, its])
    pair = str(tmp_path / "one"), str(tmp_path / "other")
    sinks = [FollowerSink("first", "First", run_dir, *pair), FollowerSink("second", "Second", run_dir, *pair[::-1])]
    for sink in sinks:
        sink.event(Train(step=1))
    EventsHook(EventWriter(run_dir.events, print), IntervalClock(), 1, sinks).close()
    assert [sink.follower and sink.follower.returncode for sink in sinks] == [0, 0]
