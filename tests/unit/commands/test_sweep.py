"""``hpctrain sweep``: what is run, what is skipped, what is submitted, and the table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpctrain.cli import main
from hpctrain.config.loading import dump
from hpctrain.errors import ExitCode
from hpctrain.launch.engines import local
from hpctrain.launch.engines.local import RunRequest
from hpctrain.run.attempts import Attempts
from hpctrain.run.verdict import Action, RunVerdict

FILE = "name: wave\ntask: m:f\ntrain: {epochs: 2, global_batch: 8}\n"
DONE = RunVerdict(Action.DONE, ExitCode.DONE, "completed")
STOPPED = RunVerdict(Action.STOP, ExitCode.STOPPED, "stopped by Ctrl-C")
FAILED = RunVerdict(Action.FAIL, ExitCode.FAILURE, "rank 0 failed")
MISTAKE = RunVerdict(Action.FAIL, ExitCode.USER_ERROR, "no such module")


class Runs:
    """In place of ranks: each run ends as it is told to, the others well."""

    def __init__(self) -> None:
        self.ends: dict[str, RunVerdict] = {}
        self.started: list[tuple[str, int]] = []

    def run(self, asked: RunRequest) -> RunVerdict:
        assert not asked.fresh, "what a run of the sweep has saved is resumed"
        run = asked.run_dir
        assert list(asked.words[:2]) == ["train", str(run.run_yaml)]
        assert run.run_yaml.read_text() == dump(asked.config)
        assert asked.ranks is not None
        self.started.append((run.path.name, asked.ranks))
        verdict = self.ends.get(run.path.name, DONE)
        Attempts(run).end(Attempts(run).begin(), verdict, [])
        return verdict


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(FILE)
    made = Runs()
    monkeypatch.setattr(local, "run", made.run)
    return made


def sweep(*words: str) -> int:
    return main(["sweep", "run.yaml", "--seed", "0,1,2", *words])


def test_each_point_is_run_and_finished_ones_are_skipped(runs, capsys):
    assert sweep("-n", "2") == 0
    assert runs.started == [("0", 2), ("1", 2), ("2", 2)]
    said = capsys.readouterr()
    assert "run 2 of 3: seed 1" in said.err
    assert "Best training loss first" in said.out
    assert sweep("-n", "2") == 0
    assert len(runs.started) == 3
    assert "3 of 3 runs have finished already" in capsys.readouterr().err
    assert sweep("--train.epochs", "4") == 0
    assert runs.started[3:] == [("0", 1), ("1", 1), ("2", 1)], "longer runs continue"


def test_a_stop_ends_the_sweep_and_the_same_command_resumes_it(runs, capsys):
    runs.ends = {"1": STOPPED}
    assert sweep() == ExitCode.STOPPED
    assert [name for name, _ in runs.started] == ["0", "1"]
    assert "the same command resumes it" in capsys.readouterr().err
    runs.ends = {}
    assert sweep() == 0
    assert [name for name, _ in runs.started[2:]] == ["1", "2"]


def test_one_failure_does_not_end_the_others(runs):
    runs.ends = {"1": FAILED}
    assert sweep() == ExitCode.FAILURE
    assert [name for name, _ in runs.started] == ["0", "1", "2"]


def test_a_mistake_of_the_first_would_be_that_of_all(runs):
    runs.ends = dict.fromkeys("012", MISTAKE)
    assert sweep() == ExitCode.USER_ERROR
    assert [name for name, _ in runs.started] == ["0"]


def test_the_table_is_printed_again(runs, capsys):
    sweep()
    capsys.readouterr()
    assert main(["sweep", "--table", "runs/wave", "--json"]) == 0
    table: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert [point["configuration"]["seed"] for point in table["points"]] == [0, 1, 2]
    assert {point["results"]["state"] for point in table["points"]} == {"done"}


def test_an_array_of_jobs_holds_what_is_left(runs, capsys):
    runs.ends = {"1": FAILED}
    sweep()
    capsys.readouterr()
    assert sweep("--submit", "--dry-run", "--at-once", "1") == 0
    assert "#SBATCH --array=1%1\n" in capsys.readouterr().out
    assert main(["sweep", "run.yaml", "--seed", "0,1,2,5,6", "--submit", "--dry-run"]) == 0
    script = capsys.readouterr().out
    assert "#SBATCH --array=1,3-4\n" in script
    assert "#SBATCH --job-name=wave\n" in script


def test_a_dry_run_starts_nothing(runs, capsys):
    assert sweep("--dry-run") == 0
    assert not runs.started
    assert "runs/wave/2: seed 2" in capsys.readouterr().out
    assert not Path("runs").exists()


def test_one_point_is_no_sweep(runs, cli):
    assert (
        "nothing is swept" in cli("sweep", "run.yaml", "--seed", "1", code=ExitCode.USER_ERROR).err
        and runs.started == []
    )
