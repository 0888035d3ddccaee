"""Programs written for other launchers print the same numbers as a job on two nodes as under their own launcher."""

import pytest

from tests.support import foreign_programs as foreign


@pytest.mark.timeout(foreign.LIMIT_S * 2)
@pytest.mark.parametrize("name", foreign.COMPARED)
def test_a_job_gives_the_numbers_of_its_own_launcher(new_run, tmp_path, name):
    program = foreign.KINDS[name]
    own = program.under_its_own_launcher(tmp_path)
    told = {"convention": program.convention, "launcher": program.launcher}
    run = new_run(launch={"command": ["python", *program.words(nodes=2)], "ranks_per_node": 1, **told})
    assert run.wait(run.submit(), "COMPLETED", "FAILED", timeout=foreign.LIMIT_S) == "COMPLETED", run.log()
    assert len(foreign.losses(own.stdout)) == 5, own.output
    assert foreign.losses(run.log()) == foreign.losses(own.stdout)
