"""Ranks of every plan read only the part of a checkpoint that they hold, and agree on the checkpoint to read."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from hpctrain.checkpoint.format.shard import SUMMED_BYTES
from tests.support.mpi import printed

pytestmark = pytest.mark.world_size(2)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], dict[str, Any]]:
    """What each run's ranks read: bytes in all, bytes of weights and optimizer, and manifests; launched once."""

    @functools.cache
    def launched() -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("reading")
        return printed(2, "checkpoint_reading.py", folder, warm="torch")  # type: ignore[no-any-return]

    return launched


@pytest.mark.parametrize(("plan", "edges"), [("tensor-again", 0), ("pipeline", 0), ("parameters", 2), ("tensor", 0)])
def test_a_resume_reads_what_a_rank_holds(found, plan, edges):
    """Each plan resumes from the previous one's checkpoint, joining columns or cutting rows into columns.

    If a rank's rows end inside a written block, it reads the rest of the block as well.
    """
    for read, weights, slots, _ in found()[f"{plan}-resumed"]:
        assert weights + slots <= read < 1.01 * (weights + slots) + edges * SUMMED_BYTES


@pytest.mark.parametrize(
    "run", ["pipeline-from-whole", "parameters-from-whole.safetensors", "tensor-from-whole.safetensors"]
)
def test_initial_weights_are_read_as_far_as_a_rank_holds_them(found, run):
    for read, weights, _, _ in found()[run]:
        assert weights <= read < 1.1 * weights


def test_one_rank_reads_the_manifest_for_all(found):
    for name, ranks in found().items():
        if name not in ("damaged", "whole"):
            assert [manifests > 0 for *_, manifests in ranks] == ["safetensors" not in name, False], name


def test_damage_that_one_rank_meets_moves_all_to_the_checkpoint_before(found):
    """Otherwise ranks would start with parts of different checkpoints."""
    assert found()["damaged"] == ["1", "1"]
