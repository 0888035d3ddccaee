"""What an attempt takes over from the one before."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.comm.world import alone
from hpctrain.config.sections import ReduceConfig
from hpctrain.rank.fit import reducer_choice
from hpctrain.reduce.candidates import Candidate
from hpctrain.reduce.reducer_choice import Choice, ReducerChoice
from hpctrain.run.attempts import Attempts
from hpctrain.run.folder import RunDir
from hpctrain.run.rank_environment import ATTEMPT

MEASURED = Choice(Candidate("mpi", "node"), {"mpi-node": 0.1, "mpi-flat": 0.2})


def choice_in(run_dir: RunDir) -> ReducerChoice:
    return reducer_choice(ReduceConfig(), alone(), run_dir, print)


def test_a_choice_is_kept_for_the_next_attempt_at_the_same_number_of_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = RunDir(tmp_path / "run")
    run_dir.create()
    attempts = Attempts(run_dir)
    monkeypatch.setenv(ATTEMPT, str(attempts.begin()))
    first = choice_in(run_dir)
    assert first.kept is None and first.record is not None
    first.record(MEASURED)
    assert choice_in(run_dir).kept == "mpi-node"
    attempts.update(reducer={**attempts.info()["reducer"], "ranks": 2})
    assert choice_in(run_dir).kept is None
