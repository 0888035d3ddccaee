"""hpctrain runs no file of the current folder, even if it is named like a standard library module."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.support.command import HPCTRAIN, environment
from tests.support.hostile import shadow_the_standard_library
from tests.support.mpi import Result, run_in_group

PROGRAM = str(Path(sys.executable).with_name("hpctrain"))


@pytest.fixture
def trap(tmp_path: Path) -> Path:
    """A folder with a file for each standard library module."""
    (tmp_path / "trap").mkdir()
    shadow_the_standard_library(tmp_path / "trap")
    return tmp_path / "trap"


def run(trap: Path, *command: str) -> Result:
    """Run a command in that folder."""
    return run_in_group(list(command), environment(), trap, timeout=200)


def assert_nothing_ran(trap: Path, said: Result) -> None:
    told = trap / "ran.txt"
    assert not told.exists(), f"{sorted(set(told.read_text().split()))} ran\n{said.output}"


@pytest.mark.parametrize("start", [[PROGRAM], HPCTRAIN], ids=["program", "module"])
def test_commands(trap, start):
    """The doctor is tried below: as a module with a task, and by the program on two ranks."""
    for words in (["install-horovod", "--json"], ["status", "."]):
        assert_nothing_ran(trap, run(trap, *start, *words))


@pytest.mark.tour
@pytest.mark.world_size(2)
def test_the_doctor_measures_the_connection_between_ranks(trap):
    said = run(trap, PROGRAM, "run", "-n", "2", "--doctor", "--json")
    assert_nothing_ran(trap, said)
    found = {finding["topic"]: finding["value"] for finding in json.loads(said.stdout)["findings"]}
    assert found["ranks"].startswith("2 on ")
    assert float(found["latency"].split()[0]) < 10_000
    assert float(found["bandwidth"].split()[0]) > 0.01


TASK = """
import numpy as np
import torch

from hpctrain import TorchTask


def shift(sample, rng):
    return {**sample, "x": sample["x"] + 1}


def task():
    model = torch.nn.Linear(3, 1)
    data = {"x": np.ones((64, 3), np.float32), "y": np.ones((64, 1), np.float32)}
    loss = lambda output, batch: ((output - batch["y"]) ** 2).mean()
    return TorchTask(model, loss, torch.optim.SGD(model.parameters(), 0.1), train=data, transform=shift)
"""


@pytest.mark.world_size(2)
def test_a_run_with_workers_monitor_and_a_task_from_elsewhere(trap, tmp_path):
    (tmp_path / "task.py").write_text(TASK)
    config = {
        "name": "r",
        "task": f"{tmp_path}/task.py:task",
        "run_dir": str(tmp_path / "run"),
        "train": {"steps": 4, "global_batch": 8},
        "data": {"workers": 1},
        "reduce": {"kind": "mpi"},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    said = run(trap, PROGRAM, "run", "-n", "2", str(tmp_path / "run.yaml"))
    assert said.returncode == 0, said.output
    assert_nothing_ran(trap, said)
    assert (tmp_path / "run" / "monitor" / "agent-0.log").read_text() == ""


@pytest.mark.parametrize("place", ["beside the task", "in the current folder"])
def test_ours_is_imported_before_the_tasks_folder_is_looked_into(trap, tmp_path, place):
    """A task's folder comes first on the path once the task is loaded, as for a script; before, none of it runs."""
    (trap / "first.py").write_text(f"import os\nopen({str(trap / 'loaded')!r}, 'w').close()\nos._exit(7)\n")
    task = f"{trap}/first.py:task" if place == "beside the task" else "first:task"
    config = {"name": "r", "task": task, "run_dir": str(tmp_path / "run"), "train": {"steps": 1, "global_batch": 1}}
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    said = run(trap, *HPCTRAIN, "train", str(tmp_path / "run.yaml"))
    assert said.returncode == 7 and (trap / "loaded").exists(), said.output
    assert_nothing_ran(trap, said)


def test_trying_a_task_runs_the_task_alone(trap, tmp_path):
    (trap / "package").mkdir()
    (trap / "package" / "__init__.py").write_text(f"open({str(trap / 'loaded')!r}, 'w').close()\n")
    (trap / "package" / "tasks.py").touch()
    (tmp_path / "run.yaml").write_text(
        f"name: r\ntask: package.tasks:task\nrun_dir: {tmp_path}/run\ntrain: {{steps: 1, global_batch: 1}}\n"
    )
    said = run(trap, *HPCTRAIN, "doctor", "--json", str(tmp_path / "run.yaml"))
    assert_nothing_ran(trap, said)
    assert (trap / "loaded").exists()
    findings = json.loads(said.stdout)["findings"]
    assert {"topic": "task", "value": "package.tasks:task", "status": "ok", "fix": ""} in findings
    topics = {finding["topic"]: finding["status"] for finding in findings}
    assert topics["PyTorch"] == topics["TensorFlow"] == topics["HDF5"] == "ok", said.stdout


EMPTY_ENTRY = """
import os, sys
folder = os.getcwd()
sys.path.insert(0, folder)
os.environ["PYTHONPATH"] = os.pathsep.join(["/somewhere", ""])
import hpctrain.__main__
print(os.environ["PYTHONPATH"], folder in sys.path)
"""


def test_an_empty_entry_of_the_search_path_is_not_the_current_folder(trap):
    said = run(trap, sys.executable, "-P", "-c", EMPTY_ENTRY)
    assert said.stdout.split() == ["/somewhere", "False"], said.output
    assert_nothing_ran(trap, said)
