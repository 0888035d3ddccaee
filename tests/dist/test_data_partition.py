"""Any number of real MPI ranks, with worker processes, sees the same global batches."""

from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.support.mpi import mpirun

PROGRAM = Path(__file__).parent / "programs" / "data_partition.py"
ROOT = Path(__file__).parents[2]


@pytest.mark.world_size(4)
@pytest.mark.parametrize("shuffle", ["full", "block"])
def test_samples_and_their_transforms_do_not_depend_on_ranks_or_workers(tmp_path, shuffle):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["id"] = np.arange(203)
        file.create_dataset("x", data=np.random.default_rng(0).normal(size=203), chunks=(16,), compression="gzip")
    said = {
        (ranks, workers): mpirun(ranks, PROGRAM, tmp_path / "a.h5", shuffle, workers).stdout
        for ranks, workers in ((1, 0), (2, 1), (3, 0), (4, 1))
    }
    assert len(set(said.values())) == 1, said
    assert said[1, 0].startswith("313 samples ")  # the last 8 batches of an epoch, and 7 of the next
