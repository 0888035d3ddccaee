"""A model that no rank could hold begins with the weights of a file: each rank has memory for its own part alone."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.mpi import mpirun
from tests.tasks.valueless_tasks import write_weights

PROGRAM = Path(__file__).parent / "programs" / "valueless.py"
ROOT = Path(__file__).parents[2]
WIDTH = 2048

pytestmark = pytest.mark.world_size(2)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], tuple[int, Any]]:
    """Bytes of the model, and what came of it; launched once, in fresh processes, whose memory is their own."""

    @functools.cache
    def launched() -> tuple[int, Any]:
        folder = tmp_path_factory.mktemp("valueless")
        weights = folder / "weights.safetensors"
        size = write_weights(weights, WIDTH)
        said = mpirun(2, PROGRAM, folder, weights, WIDTH, env={"PYTHONPATH": str(ROOT)}, timeout=240)
        weights.unlink()
        return size, json.loads(said.stdout.strip().splitlines()[-1])

    return launched


@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_a_rank_holds_its_part_and_no_more(found: Callable[[], tuple[int, Any]], axis: str) -> None:
    """Half of the model, and blocks of a few MiB through which it is read."""
    size, results = found()
    assert size > 130e6
    assert max(results[f"{axis}-true"]["added"]) < 0.7 * size
    assert min(results["tensor-false"]["added"]) > size, "as with values: else this test would show nothing"


@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_it_trains_as_if_it_had_been_made_with_values(found: Callable[[], tuple[int, Any]], axis: str) -> None:
    _, results = found()
    assert len(results[f"{axis}-true"]["losses"]) == 3
    assert results[f"{axis}-true"]["losses"] == results[f"{axis}-false"]["losses"]
