"""Fixtures: one real two-node Slurm cluster for all tests in this folder, and runs on it."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.slurm import cluster as slurm
from tests.slurm.run import STEPS, Run
from tests.support.command import PROJECT
from tests.support.mpi import PATIENCE_S


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests in this folder as needing Slurm."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slurm)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm.Cluster]:
    """A running Slurm cluster with nodes n1 and n2."""
    if reason := slurm.missing():
        pytest.skip(reason)
    with slurm.two_nodes(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture
def new_run(cluster: slurm.Cluster, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """``new_run(**keys)`` writes a run file; after the test, its jobs are cancelled and its processes awaited."""
    made: list[Run] = []

    def make(**keys: object) -> Run:
        # The marker is in the run folder's path, hence in the command line of every process of the run.
        made.append(Run.write(cluster, tmp_path / f"marker-{uuid.uuid4().hex[:12]}", **keys))
        return made[-1]

    yield make
    for run in made:
        run.hpctrain("cancel", run.folder, check=False)
    for run in made:
        slurm.until(
            lambda run=run: not cluster.processes(run.marker),
            PATIENCE_S,
            lambda run=run: str(cluster.processes(run.marker)),
        )


TASK = f"{Path(__file__).parent}/programs/slow_digits.py:task"


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The digits dataset as HDF5, packed once."""
    from hpctrain.tasks.digits_data import pack

    folder = tmp_path_factory.mktemp("digits")
    pack(str(folder))
    return folder


def training(digits: Path, sleep_s: float = 0.0, **keys: Any) -> dict[str, Any]:
    """Keys for the run file of a short training run; some are arguments of its task, programs/slow_digits.py.

    Ranks are forked from a process that has imported PyTorch, unless one is to die: with forked ranks, failures would
    be noticed in a different order than with ranks started by Slurm.
    """
    if keys.get("fault") in ("kill", "eat", "exit"):
        keys["launch"] = {**keys.get("launch", {}), "env": {"WARM_RANKS": ""}}
    names = ("fault", "rank", "at", "once", "slow_attempts")
    args = {"data": str(digits), "sleep_s": sleep_s, **{name: keys.pop(name) for name in names if name in keys}}
    keys.setdefault("train", {"steps": STEPS, "global_batch": 64, "eval_every_epochs": None})
    keys.setdefault("reduce", {"kind": "mpi"})
    keys.setdefault("checkpoint", {"every_steps": 8})
    return {"task": TASK, "task_args": args, **keys}


@pytest.fixture
def train(new_run: Callable[..., Run], digits: Path) -> Callable[..., Run]:
    """``train(sleep_s, fault=..., slurm=..., ...)`` writes the run file of a short training run."""
    return lambda sleep_s=0.0, **keys: new_run(**training(digits, sleep_s, **keys))


@dataclass(frozen=True)
class SideRun:
    """A run in the background of the tests, submitted before the first of them; it mostly sleeps."""

    run: Run
    job: str

    def end(self) -> Run:
        """Wait until the run has ended, and return it."""
        self.run.wait(self.job, "COMPLETED", "FAILED", timeout=600)
        return self.run


@pytest.fixture(scope="session")
def side_run(cluster: slurm.Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., SideRun]]:
    """``side_run(**keys)`` submits a run; ``side_run.all`` lists the submitted ones."""
    folder = tmp_path_factory.mktemp("side")
    made: list[SideRun] = []

    def submit(**keys: object) -> SideRun:
        run = Run.write(cluster, folder / f"marker-{uuid.uuid4().hex[:12]}", **keys)
        made.append(SideRun(run, run.submit()))
        return made[-1]

    submit.all = made  # type: ignore[attr-defined]
    yield submit
    for side in made:
        slurm.until(lambda side=side: not cluster.processes(side.run.marker), PATIENCE_S)


def limited(kind: str) -> dict[str, Any]:
    """Keys for a job that runs examples/programs/<kind> for 90 s.

    Slurm signals 22 to 52 s after a start, and a start takes some seconds, so that two limits are reached.
    """
    launcher, devices = ("srun", ["1", "2"]) if kind == "lightning" else ("auto", [])
    command = [*program(kind), *devices, "--steps", "90", "--seconds-per-step", "1"]
    launch = {"command": command, "launcher": launcher, "ranks_per_node": 1}
    return {"launch": launch, "slurm": {"time": "1", "signal_s": 8}}


def program(kind: str) -> list[str]:
    """Command of a program of examples/programs."""
    return [sys.executable, str(PROJECT / "examples" / "programs" / kind / "train.py")]


@pytest.fixture(scope="session")
def undisturbed_run(side_run: Callable[..., SideRun], digits: Path) -> SideRun:
    """The uninterrupted run whose final weights all others must match."""
    return side_run(**training(digits, launch={"launcher": "srun"}))


@pytest.fixture(scope="session")
def signalled_run(side_run: Callable[..., SideRun], digits: Path) -> SideRun:
    """A run that takes longer than two time limits.

    Slurm checks time limits every 30 s, so the signal comes 22 to 52 s after a start. The steps take 106 s.
    """
    keys = {"track": {"every_steps": 1}, "checkpoint": {"interval": "none"}, "slurm": {"time": "1", "signal_s": 8}}
    return side_run(**training(digits, 2.2, slow_attempts=2, **keys))


@pytest.fixture(scope="session")
def unsignalled_run(side_run: Callable[..., SideRun], digits: Path) -> SideRun:
    """A run whose job is killed 60 to 90 s after its start, without a prior signal."""
    limit = {"time": "1", "skip": ["--signal"]}
    return side_run(**training(digits, 1.9, checkpoint={"every_steps": 4}, slurm=limit))


@pytest.fixture(scope="session")
def limited_program(side_run: Callable[..., SideRun]) -> SideRun:
    """A program of its own that takes longer than two time limits; see test_programs_at_limits.py."""
    return side_run(**limited("pytorch"))


@pytest.fixture(scope="session", autouse=True)
def _side_runs_come_first(request: pytest.FixtureRequest) -> None:
    wanted = {name for item in request.session.items for name in getattr(item, "fixturenames", ())}
    for name in ("undisturbed_run", "signalled_run", "unsignalled_run", "limited_program"):
        if name in wanted:
            request.getfixturevalue(name)


@pytest.fixture(scope="session")
def undisturbed(undisturbed_run: SideRun) -> str:
    """Hash of the weights of the undisturbed run."""
    return undisturbed_run.end().weights()


@pytest.fixture
def alone(side_run: Callable[..., SideRun]) -> None:
    """Wait until all side runs have ended, for tests that disable a node or fill its memory."""
    for side in side_run.all:  # type: ignore[attr-defined]
        side.end()
