"""Plans that are killed at a random update and resume, with a model that also has empty weights. Runs that are not
killed evaluate at other steps, which changes nothing."""

import json

import pytest

from tests.support.command import PROJECT
from tests.support.mpi import mpirun

APART = ("pipeline", "zero2", "zero3", "frozen", "keras")
"""Plans whose ranks have no whole model."""
PROGRAM = PROJECT / "tests/dist/programs/killed_plans.py"

pytestmark = pytest.mark.world_size(3)


@pytest.mark.parametrize(("framework", "plans"), [("torch", 14), ("tensorflow", 4)])
def test_a_killed_run_ends_as_one_that_was_not_killed(framework, plans, tmp_path):
    def ends(ranks, check=True):
        words = PROGRAM, framework, tmp_path
        return mpirun(ranks, *words, warm=framework, check=check).returncode

    assert all([ends(2, check=False) for _ in range(plans)]), "each plan is killed once"
    ends(2)
    ends(3)
    found = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert len(found) == plans
    for name, end in found.items():
        assert end["resumed"] == end["straight"], name
        assert len(set(end["straight"]["weights"])) == (2 if name in APART else 1), name
        assert len(set(end["three"]["weights"])) == 1, name
        if name != "local-overlap":  # which no longer trains apart
            assert end["three"]["loss"] == pytest.approx(end["straight"]["loss"], rel=0.05), name
