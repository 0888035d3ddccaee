"""Tests of the doctor on two real MPI ranks."""

from __future__ import annotations

import json

import pytest

from tests.support.command import hpctrain

pytestmark = pytest.mark.world_size(2)


@pytest.mark.tour
def test_the_connection_between_ranks_is_measured():
    result = hpctrain("run", "-n", 2, "--doctor", "--json")
    found = {finding["topic"]: finding["value"] for finding in json.loads(result.stdout)["findings"]}
    assert found["ranks"].startswith("2 on ")
    assert float(found["latency"].split()[0]) < 10_000
    assert float(found["bandwidth"].split()[0]) > 0.01


def test_a_broken_mpi_is_one_problem_with_its_fix(tmp_path):
    result = hpctrain("run", "-n", 2, "--doctor", env={"OMPI_MCA_btl": "nonsense", "UCX_TLS": "nonsense"}, code=None)
    if result.returncode:  # MPICH and some builds ignore these variables
        assert "problem ranks" in result.stdout, result.output
        assert "fix: " in result.stdout
