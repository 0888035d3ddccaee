"""One real two-node Slurm for all tests of this folder."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.slurm import cluster as slurm
from tests.slurm.run import Run

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
        pytest.skip(f"no Slurm: {reason}")
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
    """``new_run(**keys)`` writes a run file; its jobs are cancelled and no process of its is left when the test ends."""
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
