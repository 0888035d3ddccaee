"""``hpctrain.fit`` in a user's program behaves like ``hpctrain train``: session, last words, run folder."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hpctrain.run.attempts import Attempts
from hpctrain.run.folder import RunDir
from tests.support.command import PROJECT, environment, events, hpctrain, last_words, write_run
from tests.support.mpi import Result, mpirun, python, run_in_group

PROGRAM = PROJECT / "tests/dist/programs/fit_program.py"
TASK = f"{PROJECT}/tests/tasks/torch_slow_task.py:task"


def run_file(folder: Path, **sections: Any) -> Path:
    """Write a run file with six steps and validation."""
    settings: dict[str, Any] = {
        "task": TASK,
        "task_args": {"step_s": 0},
        "run_dir": str(folder / "run"),
        "train": {"steps": 6, "global_batch": 16},
        "reduce": {"kind": "auto"},
        "monitor": {"enabled": False},
    }
    return write_run(folder, **{**settings, **sections})


def alone(scenario: str, path: Path, *words: str) -> Result:
    """Run the program as one process."""
    command = [*python("torch"), str(PROGRAM), scenario, str(path), *words]
    return run_in_group(command, environment(), path.parent, timeout=120)


def told(result: Result) -> list[dict[str, Any]]:
    """What the program printed of its summaries."""
    assert result.returncode == 0, result.output
    return [json.loads(line) for line in re.findall(r"^told (.*)$", result.stdout, re.M)]


@pytest.mark.tour
def test_it_leaves_what_the_command_leaves(tmp_path):
    path = run_file(tmp_path)
    (summary,) = told(alone("plain", path))
    command = tmp_path / "command"
    hpctrain("train", path, "--run_dir", command, cwd=tmp_path, warm="torch")
    run = tmp_path / "run"
    assert (summary["reason"], summary["step"], summary["attempt_left"]) == ("completed", 6, False)
    assert summary["metrics"] == events(run, "eval")[-1]["metrics"] == events(command, "eval")[-1]["metrics"]
    (word,), (other,) = last_words(run), last_words(command)
    assert word["ending"] == "completed" and word["weights_hash"] == other["weights_hash"]
    assert {path.name for path in run.iterdir()} == {path.name for path in command.iterdir()}
    assert Attempts(RunDir(run)).info()["attempts"][0].keys() == Attempts(RunDir(command)).info()["attempts"][0].keys()
    assert not (run / "run.lock").exists()
    assert told(alone("plain", path))[0]["seconds"] < 1, "a complete run is left alone"


def test_hooks_and_sinks_of_the_program(tmp_path):
    first, second = told(alone("in_parts", run_file(tmp_path)))
    assert (first["reason"], first["step"]) == ("stop_requested", 3)
    assert (second["reason"], second["step"]) == ("completed", 6)
    assert second["seen"] == [16, 32, 48, 64, 80, 96] and second["total"] == [6.0]
    assert second["events"][0] == "run_started" and second["events"][-2:] == ["run_finished", "closed"]


def test_an_error_is_raised_and_not_shown_besides(tmp_path):
    path = run_file(tmp_path, task=f"{PROJECT}/tests/tasks/torch_slow_task.py:no_such_function")
    done = alone("caught", path)
    assert done.returncode == 0 and "caught UserError task" in done.stdout, done.output
    assert done.stderr == ""
    (word,) = last_words(tmp_path / "run")
    assert word["ending"] == "failed" and word["exit_code"] == 64
    raised = alone("plain", path)
    assert raised.returncode == 1 and raised.stderr.count("Traceback") == 1


@pytest.mark.world_size(2)
def test_two_runs_in_one_program_on_two_ranks(tmp_path):
    done = mpirun(2, PROGRAM, "twice", run_file(tmp_path), cwd=tmp_path, warm="torch")
    assert [summary["reason"] for summary in told(done)] == ["completed", "completed"]
    for name in ("first", "second"):
        assert done.stderr.count(f"rank speaks after {name}") == 2, "output is back where it was"
        assert [word["ending"] for word in last_words(tmp_path / f"run-{name}")] == ["completed"] * 2


@pytest.mark.world_size(2)
def test_hooks_whose_state_differs_between_ranks(tmp_path):
    path = run_file(tmp_path, checkpoint={"verify_replicated": True})
    done = mpirun(2, PROGRAM, "differing", path, cwd=tmp_path, check=False, warm="torch")
    assert done.returncode != 0
    assert done.output.count("1 tensors differ between ranks at step 6: hooks/Counter/total") == 1
    assert "Traceback" not in done.output, "tracebacks are in the ranks' logs"


@pytest.mark.world_size(2)
def test_an_error_of_all_ranks_is_shown_once(tmp_path):
    path = run_file(tmp_path, task=f"{PROJECT}/tests/tasks/torch_slow_task.py:no_such_function")
    done = mpirun(2, PROGRAM, "plain", path, cwd=tmp_path, check=False, warm="torch")
    assert done.returncode != 0
    assert done.output.count("has no function 'no_such_function'") == 1
    assert "Traceback" not in done.output
