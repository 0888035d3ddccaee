"""Plans that are killed at a random update and resume, of a model that has weights without elements as well."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.command import PROJECT
from tests.support.mpi import mpirun

PROGRAM = PROJECT / "tests/dist/programs/killed_plans.py"
PLANS = 10

pytestmark = pytest.mark.world_size(3)


def test_a_killed_run_ends_as_one_that_was_not_killed(tmp_path: Path) -> None:
    arguments, environment = (PROGRAM, tmp_path), {"PYTHONPATH": str(PROJECT)}
    codes = [mpirun(2, *arguments, env=environment, warm="torch", check=False).returncode for _ in range(PLANS)]
    assert all(codes), "each plan is killed once"
    mpirun(2, *arguments, env=environment, warm="torch")
    mpirun(3, *arguments, env=environment, warm="torch")
    found = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert len(found) == PLANS
    for name, ends in found.items():
        assert ends["resumed"] == ends["straight"], name
        assert len(set(ends["straight"]["weights"])) == (2 if name == "pipeline" else 1), name
        assert len(set(ends["three"]["weights"])) == 1, name
        if name != "local-overlap":  # which no longer trains apart
            assert ends["three"]["loss"] == pytest.approx(ends["straight"]["loss"], rel=0.05), name
