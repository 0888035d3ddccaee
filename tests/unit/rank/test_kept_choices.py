"""What an attempt takes over from the one before."""

from __future__ import annotations

from types import SimpleNamespace

from hpctrain.comm.world import alone
from hpctrain.rank.kept_choices import KeptReducer, kept_reducer, note_nccl
from hpctrain.reduce.candidates import Candidate
from hpctrain.reduce.reducer_choice import Choice
from hpctrain.run.attempts import Attempts
from hpctrain.run.folder import RunDir
from hpctrain.run.rank_environment import ATTEMPT

MEASURED = Choice(Candidate("mpi", "node"), {"mpi-node": 0.1, "mpi-flat": 0.2})


def choice_in(run_dir: RunDir) -> KeptReducer:
    return kept_reducer(SimpleNamespace(world=alone(), warn=print, folder=run_dir))  # type: ignore[arg-type]


def test_a_choice_is_kept_for_the_next_attempt_at_the_same_number_of_ranks(tmp_path, monkeypatch):
    run_dir = RunDir(tmp_path / "run")
    run_dir.create()
    attempts = Attempts(run_dir)
    monkeypatch.setenv(ATTEMPT, str(attempts.begin()))
    first = choice_in(run_dir)
    assert first.name is None and first.record is not None
    first.record(MEASURED)
    assert choice_in(run_dir).name == "mpi-node"
    attempts.update(reducer={**attempts.info()["reducer"], "ranks": 2})
    assert choice_in(run_dir).name is None


def test_a_resume_with_another_nccl_says_so(tmp_path, monkeypatch):
    run_dir, said = RunDir(tmp_path / "run"), list[str]()
    run_dir.create()
    monkeypatch.setenv(ATTEMPT, str(Attempts(run_dir).begin()))
    session = SimpleNamespace(world=alone(), warn=said.append, folder=run_dir)
    for settings in ({"version": "2.28.9"}, {"version": "2.28.9"}, {}):
        note_nccl(settings, session)  # type: ignore[arg-type]
    assert not said and Attempts(run_dir).info()["nccl"] == {"version": "2.28.9"}
    note_nccl({"version": "2.29.7", "NCCL_ALGO": "Ring"}, session)  # type: ignore[arg-type]
    assert said == [
        "NCCL differs from that of the last attempt (NCCL_ALGO unset -> Ring, version 2.28.9 -> 2.29.7): the last bits "
        "of sums may differ, too"
    ]
