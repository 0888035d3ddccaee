"""One real two-node Slurm for all tests of this folder."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.slurm import cluster as slurm
from tests.slurm.run import STEPS, Run

RANKS = {
    # Fake nodes share one machine: no shared memory between them, and TCP over the loopback only.
    "OMPI_MCA_btl": "tcp,self",
    "OMPI_MCA_btl_tcp_if_include": "lo",
    "OMPI_MCA_pml": "ob1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_ALLOW_RUN_AS_ROOT": "1",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMP_NUM_THREADS": "1",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here needs Slurm."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slurm)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm.Cluster]:
    """A running Slurm with nodes n1 and n2."""
    if reason := slurm.missing():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "home").mkdir()
    checkout = Path(__file__).parents[2]
    environment = {
        "PATH": f"{Path(sys.executable).parent}:{slurm.SEARCH_PATH}",
        "PYTHONPATH": str(checkout),
        "HOME": str(folder / "home"),
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": os.environ.get("PYTHONDONTWRITEBYTECODE", ""),
        **RANKS,
    }
    with slurm.two_nodes(folder / "slurm", environment) as running:
        yield running


@pytest.fixture
def new_run(cluster: slurm.Cluster, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """``new_run(**keys)`` writes a run file; at its end the test leaves no job and no process."""
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
            lambda run=run: not cluster.processes(run.marker), 20, lambda run=run: str(cluster.processes(run.marker))
        )


TASK = f"{Path(__file__).parent}/programs/slow_digits.py:task"


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The digits as HDF5, packed once."""
    from hpctrain.tasks.digits_data import pack

    folder = tmp_path_factory.mktemp("digits")
    pack(str(folder))
    return folder


@pytest.fixture
def train(new_run: Callable[..., Run], digits: Path) -> Callable[..., Run]:
    """``train(sleep_s, fault=..., slurm=..., ...)`` writes the run file of a short training run."""

    def make(sleep_s: float = 0.0, **keys: Any) -> Run:
        names = ("fault", "rank", "at", "once")
        args = {"data": str(digits), "sleep_s": sleep_s, **{name: keys.pop(name) for name in names if name in keys}}
        keys.setdefault("train", {"steps": STEPS, "global_batch": 64, "eval_every_epochs": None})
        keys.setdefault("reduce", {"kind": "mpi"})
        keys.setdefault("checkpoint", {"every_steps": 8})
        return new_run(task=TASK, task_args=args, **keys)

    return make


@pytest.fixture(scope="session")
def reference() -> dict[str, str]:
    """Under "hash" the weights of the run that nothing disturbed, once one has ended."""
    return {}


@pytest.fixture
def undisturbed(train: Callable[..., Run], reference: dict[str, str]) -> str:
    """Hash of the weights that nothing disturbed."""
    if not reference:
        run = train()
        run.wait(run.submit(), "COMPLETED")
        reference["hash"] = run.weights()
    return reference["hash"]
