"""Hosts with separate networks, and processes that fork ranks, which xdist's workers share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import netns, warm_ranks
from tests.support.mpi import ROOT, rank_environment


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes() -> None:
    """Import the frameworks once, while the workers collect tests."""
    for framework in ("torch", "tensorflow"):
        warm_ranks.start(framework, rank_environment({"PYTHONPATH": str(ROOT)}))


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
