"""Layers that two ranks split train as whole ones do, however their activations are exchanged."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.mpi import printed
from tests.support.plan_runs import require_near, require_same_state

pytestmark = pytest.mark.world_size(2)
Found = dict[str, Any]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], tuple[Path, Found]]:
    """Folder of all runs, and their results; launched once."""

    @functools.cache
    def launched() -> tuple[Path, Found]:
        folder, results = tmp_path_factory.mktemp("exchanges"), {}
        for ranks in (2, 1):
            results |= printed(ranks, "tensor_exchanges.py", folder, timeout=300, warm="torch")
        return folder, results

    return launched


@pytest.mark.parametrize("name", ["group", "rows", "compiled"])
def test_every_exchange_is_exact(found, name):
    """By gloo with whole activations and with rows; by MPI with rows, in compiled layers that recompute."""
    folder, results = found()
    require_near(results[name]["losses"], results["alone"]["losses"])
    assert len(results[name]["losses"]) == 3
    require_same_state(folder, name, "alone", 3, least=80)
