"""Every TensorFlow reducer gives the exact sum of the values sent, bitwise identical on all ranks."""

import pytest

from tests.support.mpi import printed


@pytest.mark.parametrize("ranks", [pytest.param(n, marks=pytest.mark.world_size(n)) for n in (2, 4)])
def test_sums_are_exact_and_equal_on_all_ranks(ranks):
    found = printed(ranks, "tensorflow_sums.py", warm="tensorflow")
    by_mpi = {"mpi-node", "mpi-pieces", "mpi-flat", "mpi-flat-fp16", "mpi-flat-bf16"}
    wide = {f"{name} in float64" for name in ("mpi-node", "mpi-flat", "horovod-flat")}
    assert set(found) == by_mpi | wide | {"horovod-flat", "horovod-flat-fp16"}
    for name, sums in found.items():
        in_other_order = (
            2e-3 if name == "horovod-flat-fp16" else 2e-7
        )  # MPI chooses the order in which four terms are added
        assert sums["same"], name
        assert sums["difference"] <= (0 if ranks == 2 else 1e-15 if name in wide else in_other_order), name
