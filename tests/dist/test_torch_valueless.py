"""A model too large for any rank starts with weights from a file; each rank has memory only for its own part."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.mpi import printed
from tests.tasks.valueless_tasks import write_weights

WIDTH = 2048

pytestmark = pytest.mark.world_size(2)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], tuple[int, Any]]:
    """Bytes of the model, and results; launched once, in new processes rather than forks, to measure their memory."""

    @functools.cache
    def launched() -> tuple[int, Any]:
        folder = tmp_path_factory.mktemp("valueless")
        weights = folder / "weights.safetensors"
        size = write_weights(weights, WIDTH)
        env = {"MALLOC_MMAP_THRESHOLD_": "1000000"}  # what is freed is given back
        results = printed(2, "valueless.py", folder, weights, WIDTH, env=env)
        weights.unlink()
        return size, results

    return launched


@pytest.mark.parametrize(("axis", "most"), [("tensor", 0.7), ("pipeline", 0.7), ("shard", 1.0)])
def test_a_rank_holds_its_part_and_no_more(found, axis, most):
    """A rank's memory is half of the model, plus blocks of a few MiB for reading; and gathered layers, of 8."""
    size, results = found()
    assert size > 130e6
    assert max(results[f"{axis}-true"]["added"]) < most * size
    assert min(results["tensor-false"]["added"]) > size, "as with values: else this test would show nothing"


@pytest.mark.parametrize("axis", ["tensor", "pipeline", "shard"])
def test_it_trains_as_if_it_had_been_made_with_values(found, axis):
    _, results = found()
    assert len(results[f"{axis}-true"]["losses"]) == 3
    assert results[f"{axis}-true"]["losses"] == results[f"{axis}-false"]["losses"]
