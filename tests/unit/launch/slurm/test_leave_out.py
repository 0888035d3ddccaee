"""Nodes that break a run's attempts are left out of its next job."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest

from hpctrain.config.sections import Config, LaunchConfig, MonitorConfig, SlurmConfig
from hpctrain.errors import Code, ExitCode
from hpctrain.launch.engines.slurm import leave_out
from hpctrain.launch.engines.slurm.allocation import of_nodes
from hpctrain.launch.engines.slurm.preflight import Fault
from hpctrain.run import bad_nodes
from hpctrain.run.attempts import Attempt, Attempts
from hpctrain.run.folder import RunDir
from hpctrain.run.last_words import Ending, ErrorWord, LastWord
from hpctrain.run.verdict import Action, RunVerdict

BROKEN = RunVerdict(Action.REQUEUE, ExitCode.FAILURE, "no module named h5py", "", 1, "n2.local", Code.EXCEPTION)
ERROR = ErrorWord("no module named h5py", "install it", "ModuleNotFoundError", "", Code.EXCEPTION)
WORDS = [
    LastWord(0, "n1.local", 1, 1.0, 0.0, Ending.TAKEN_DOWN, 1.0),
    LastWord(1, "n2.local", 1, 1.0, 0.0, Ending.FAILED, 1.0, ExitCode.FAILURE, error=ERROR),
]


def config(choice: str) -> Config:
    slurm = SlurmConfig(exclude=("n9",), bad_nodes=choice)  # type: ignore[arg-type]
    launch = LaunchConfig(command=("true",), slurm=slurm)
    return Config(name="r", launch=launch, monitor=MonitorConfig(exclude_hours=2))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run of which n2 alone has broken one attempt."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    run = RunDir(tmp_path / "run")
    run.create()
    fail(run)
    return run


def fail(run: RunDir) -> None:
    number = Attempts(run).begin(Attempt(job="7", nodes=2, ranks=2))
    Attempts(run).end(number, BROKEN, WORDS)


@pytest.mark.parametrize(("choice", "left_out"), [("run", True), ("shared", True), ("off", False)])
def test_a_node_that_breaks_two_attempts_is_left_out(run, capsys, choice, left_out):
    leave_out.note_culprit(config(choice), run)
    assert leave_out.option(config(choice), run) == [], "once may be chance"
    fail(run)
    leave_out.note_culprit(config(choice), run)
    assert leave_out.option(config(choice), run) == (["--exclude=n9,n2"] if left_out else [])
    assert ("n2 is excluded at the next start, for 2 h" in capsys.readouterr().err) is left_out
    assert len(bad_nodes.shared().entries(0.0)) == (choice == "shared")


def test_a_node_is_used_again_once_its_failure_follows_the_rank(run):
    fail(run)
    leave_out.note_culprit(config("shared"), run)
    other = bad_nodes.BadNode("n2.local", time.time() + 3600, 1, "slow", "/runs/other")
    assert leave_out.avoided(config("shared"), run) == ["n2"]
    number = Attempts(run).begin(Attempt(job="7", nodes=2, ranks=2))
    moved = [dataclasses.replace(word, host="n3.local") for word in WORDS]
    Attempts(run).end(number, dataclasses.replace(BROKEN, host="n3.local"), moved)
    leave_out.note_culprit(config("shared"), run)
    assert leave_out.avoided(config("shared"), run) == []
    bad_nodes.shared().add(other)
    leave_out.note_culprit(config("shared"), run)
    assert leave_out.avoided(config("shared"), run) == ["n2"], "what another run found stays"


def test_another_run_that_shares_leaves_it_out_too(run, tmp_path):
    fail(run)
    leave_out.note_culprit(config("shared"), run)
    other = RunDir(tmp_path / "other")
    assert leave_out.avoided(config("shared"), other) == ["n2"]
    assert leave_out.avoided(config("run"), other) == []


def test_a_list_that_cannot_be_written_changes_nothing(run, capsys):
    fail(run)
    (run.monitor / bad_nodes.FILE).mkdir()
    leave_out.note_culprit(config("run"), run)
    assert "cannot write" in capsys.readouterr().err


def test_a_preflight_blames_nodes_only_where_others_passed():
    problem = Fault("scratch of n2 cannot be written", "exclude the host", "n2")
    everywhere = [problem, dataclasses.replace(problem, host="n1")]
    assert of_nodes([problem], {0: "n1", 1: "n2"}) == [problem]
    assert of_nodes(everywhere, {0: "n1", 1: "n2"}) == []
    assert of_nodes([dataclasses.replace(problem, fatal=False)], {0: "n1", 1: "n2"}) == []
    assert of_nodes([dataclasses.replace(problem, launcher=True)], {0: "n1", 1: "n2"}) == []


@pytest.mark.parametrize("hours", [float("inf"), 1e9])
def test_a_node_may_be_left_out_forever(run, hours):
    leave_out.note(dataclasses.replace(config("run"), monitor=MonitorConfig(exclude_hours=hours)), run, "n2", "slow", 1)
    assert leave_out.option(config("run"), run) == ["--exclude=n9,n2"]
