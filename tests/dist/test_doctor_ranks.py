"""The doctor on two real MPI ranks; test_current_folder.py has what it says of a sound MPI."""

import pytest

from tests.support.command import hpctrain

pytestmark = pytest.mark.world_size(2)


def test_a_broken_mpi_is_one_problem_with_its_fix(tmp_path):
    result = hpctrain("run", "-n", 2, "--doctor", env={"OMPI_MCA_btl": "nonsense", "UCX_TLS": "nonsense"}, code=None)
    if result.returncode:  # MPICH and some builds ignore these variables
        assert "problem ranks" in result.stdout, result.output
        assert "fix: " in result.stdout
