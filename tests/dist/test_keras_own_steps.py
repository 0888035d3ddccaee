"""Keras models with their own ``train_step`` train on 1, 2 and 4 real MPI ranks as Keras does in one process."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.support.mpi import printed


@functools.cache
def results(ranks: int) -> dict[str, Any]:
    """Results on this number of ranks, run once."""
    found: dict[str, Any] = printed(ranks, "keras_own_steps.py", warm="tensorflow")
    return found


@pytest.mark.world_size(4)
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.tour), 4])
def test_two_optimizers_on_ranks_train_as_keras_does_in_one_process(ranks):
    """The last batch of each epoch leaves the last of 4 ranks without samples."""
    for kind in ("auto", "mpi" if ranks > 1 else "none"):
        found = results(ranks)[kind]
        assert found["weights"] < 1e-6 and found["losses"] < 1e-5, (kind, found)
        assert len(set(found["hashes"])) == 1 and all(slots == found["slots"][0] for slots in found["slots"])
        assert found["reducer"]


@pytest.mark.world_size(4)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_rows_of_tables_train_as_keras_does_in_one_process(ranks):
    """A table is updated by rows when alone, and as a whole together with other weights."""
    found = results(ranks)["looked up"]
    assert found["weights"] < 1e-6 and len(set(found["hashes"])) == 1
    assert found["tables"] == ([1, 1] if ranks > 1 else [1, 0])


@pytest.mark.world_size(2)
def test_what_cannot_be_exchanged_is_said_on_all_ranks():
    found = results(2)
    assert all("not finite on ranks [1]" in said for said in found["not finite"])
    assert all(
        "train_step of rank 1 updates other weights than that of rank 0" in said for said in found["other order"]
    )
