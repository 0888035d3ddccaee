"""Fixtures: finished runs that several tests read, each launched once, and hosts with separate networks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support import netns
from tests.support.command import hpctrain, misbehaving_run
from tests.support.mpi import Result


@dataclass(frozen=True)
class Ended:
    """A finished run of two ranks."""

    folder: Path
    """Folder of the run file; the run folder is ``run`` inside it."""
    said: Result
    """Output and exit code of ``hpctrain run``."""

    @property
    def run(self) -> Path:
        """The run folder; tests must only read it."""
        return self.folder / "run"


@pytest.fixture
def network(tmp_path: Path) -> Iterator[netns.Network]:
    """A network of three hosts."""
    folder = tmp_path / "network"
    folder.mkdir()
    try:
        with netns.network(3, "1gbit", folder) as made:
            yield made
    except netns.NotPermitted as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Ended]:
    """`ended(mode)`: a run of programs/launch_task.py whose rank 1 misbehaves in this mode; by default none does."""

    @functools.cache
    def run(mode: str = "") -> Ended:
        folder = tmp_path_factory.mktemp(mode or "well-behaved")
        said = hpctrain("run", "-n", 2, misbehaving_run(folder, mode), code=None, warm="torch")
        return Ended(folder, said)

    return run
