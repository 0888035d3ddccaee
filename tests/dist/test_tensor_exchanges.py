"""Layers that two ranks split train as whole ones do, however their activations are exchanged."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
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


@pytest.mark.parametrize("name", ["group", "rows", "compiled", "compiled-rows"])
def test_every_exchange_is_exact(found: Callable[[], tuple[Path, Found]], name: str) -> None:
    """By gloo and MPI, with whole activations and with rows, eager and compiled layers, and layers that recompute."""
    folder, results = found()
    require_near(results[name]["losses"], results["alone"]["losses"])
    assert len(results[name]["losses"]) == 3
    require_same_state(folder, name, "alone", 3, least=80)


def test_16_bit_sums_are_added_as_asked(found: Callable[[], tuple[Path, Found]]) -> None:
    """Eight bits of factors round by 2**-9: losses are near those of sums in fp32, but not equal."""
    wide, narrow = (np.array(found()[1][f"{name}-sums"]["losses"]) for name in ("fp32", "bf16"))
    np.testing.assert_allclose(narrow, wide, rtol=0.02)
    assert not np.array_equal(narrow, wide)
