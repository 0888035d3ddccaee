"""`hpctrain watch` on a pseudo-terminal follows a real run from before its start to its end."""

from __future__ import annotations

import json
import re
import termios
from pathlib import Path

import pytest

from hpctrain.run import live_lock
from hpctrain.run.attempts import Attempt, Attempts
from hpctrain.run.folder import RunDir
from tests.support.command import hpctrain, misbehaving_run, started
from tests.support.gate import Gate
from tests.support.mpi import PATIENCE_S
from tests.support.pseudo_terminal import OFF, on_a_terminal


@pytest.mark.tour
@pytest.mark.world_size(2)
def test_a_run_of_two_ranks_from_before_its_start_to_its_end(tmp_path):
    monitor = {"enabled": True, "window_steps": 8}
    checkpoint = {"every_steps": 70}  # remains the newest for several pictures
    gate = Gate(tmp_path / "gate").close(1)
    path = misbehaving_run(
        tmp_path,
        train={"steps": 150},
        track={"every_steps": 2},
        monitor=monitor,
        checkpoint=checkpoint,
        task_args={"gate": str(gate.folder), "at": 100},
    )
    with on_a_terminal("watch", path) as terminal:
        terminal.wait_for("word that it has not begun", lambda picture: "not started" in picture)
        with started("run", "-n", 2, path, env={"STEP_S": "0.05"}, warm="torch") as run:
            terminal.wait_for("checkpoint", lambda picture: "checkpoint" in picture and "step 70" in picture)
            terminal.wait_for("bars of both ranks", lambda picture: len(re.findall(r"\n +[01] \S.*█", picture)) == 2)
            gate.open()
            assert terminal.end() == 0
            assert run.wait(PATIENCE_S) == 0
    running = [picture for picture in terminal.pictures() if "  running  " in picture]
    steps = [int(found[1]) for picture in running if (found := re.search(r"step (\d+)/150", picture))]
    assert len(set(steps)) >= 2 and steps == sorted(steps)
    assert any("steps/s" in picture and "ends in" in picture for picture in running)
    assert any("checkpoint" in picture and "step 70" in picture for picture in running)
    last = terminal.left_behind()
    assert "finished  attempt 1  2 ranks on 1 host" in last and "step 150/150" in last and "100%" in last

    view = json.loads(hpctrain("watch", tmp_path / "run", "--json").stdout)
    assert (view["state"], view["step"], view["is_over"]) == ("finished", 150, True)
    assert [rank["rank"] for rank in view["ranks"]] == [0, 1]
    once = hpctrain("watch", tmp_path / "run").stdout
    assert once.splitlines()[0] in last and "\x1b" not in once


@pytest.fixture
def live_folder(tmp_path: Path) -> Path:
    """Folder of a run whose lock this process holds, but that does nothing."""
    run = RunDir(tmp_path / "run")
    run.create()
    Attempts(run).begin(Attempt(ranks=1))
    live_lock.LiveLock(run, live_lock.myself()).acquire()
    return run.path


@pytest.mark.parametrize("key", [b"q", b"\x03"], ids=["q", "Ctrl-C"])
def test_a_key_ends_the_view_and_leaves_the_terminal_as_it_was(key, live_folder):
    with on_a_terminal("watch", live_folder, columns=60, rows=12) as terminal:
        before = termios.tcgetattr(terminal.keyboard)
        terminal.wait_for("picture", lambda picture: "running" in picture)
        assert termios.tcgetattr(terminal.keyboard) != before, "keys are read one by one"
        terminal.press(key)
        assert terminal.end() == 0
        assert termios.tcgetattr(terminal.keyboard) == before
    assert OFF in terminal.text
    assert terminal.left_behind().strip() in ("", "^C")
    assert "Traceback" not in terminal.text
