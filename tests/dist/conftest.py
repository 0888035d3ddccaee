"""Runs that several tests look at and none changes, each launched once; and hosts with separate networks."""

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
    """A run of two ranks that has come to its end."""

    folder: Path
    """Of its run file; its run folder is ``run`` in there."""
    said: Result
    """Of ``hpctrain run``, the exit code included."""

    @property
    def run(self) -> Path:
        """Its run folder: to be read only."""
        return self.folder / "run"


@pytest.fixture
def network(tmp_path: Path) -> Iterator[netns.Network]:
    """Three hosts."""
    folder = tmp_path / "network"
    folder.mkdir()
    try:
        with netns.network(3, "1gbit", folder) as made:
            yield made
    except netns.NotPermitted as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Ended]:
    """`ended(mode)`: the run of programs/launch_task.py whose rank 1 misbehaves so, or of which none does."""

    @functools.cache
    def run(mode: str = "") -> Ended:
        folder = tmp_path_factory.mktemp(mode or "well-behaved")
        said = hpctrain("run", "-n", 2, misbehaving_run(folder, mode), code=None, warm="torch")
        return Ended(folder, said)

    return run
