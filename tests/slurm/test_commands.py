"""Plain commands as Slurm jobs: nodes, signals, requeue and logs without our trainer."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.slurm.run import Run


@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
def test_a_command_runs_once_a_rank_on_both_nodes(new_run: Callable[..., Run], launcher: str) -> None:
    run = new_run(launch={"command": ["bash", "-c", "echo $(hostname) $HPCTRAIN_ATTEMPT"], "launcher": launcher})
    job = run.submit()
    assert run.wait(job, "COMPLETED", "FAILED") == "COMPLETED", run.log()
    assert sorted(line for line in run.log().splitlines() if line.endswith(" 1")) == ["n1 1", "n1 1", "n2 1", "n2 1"]
    assert run.status()["state"] == "COMPLETED"
