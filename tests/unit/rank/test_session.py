"""Errors that ranks exchange."""

from __future__ import annotations

from typing import Any

import pytest

from hpctrain.comm.group import Group
from hpctrain.comm.world import alone
from hpctrain.errors import NotAllowed, RunFailed
from hpctrain.rank import session
from hpctrain.rank.session import Session
from hpctrain.rank.stop_requests import StopSignals
from hpctrain.run.folder import RunDir
from hpctrain.run.last_words import LastWord, collect
from hpctrain.run.rank_environment import ATTEMPT, RUN_DIR
from tests.support.command import wait_for


class Late(Group):
    """A group whose other ranks do not arrive in time; their next exchange would meet the one that was given up."""

    asked = 0

    def allgather(self, value: Any, what: str = "", timeout_s: float = 0.0) -> list[Any]:
        self.asked += 1
        raise RunFailed(f"rank 0 waited {timeout_s} s for the other ranks to {what}", "none")


def test_after_an_exchange_that_was_given_up_there_is_no_other():
    late = Late("errors")
    session = Session(alone(), late, StopSignals())
    with pytest.raises(ValueError, match="by this rank"), session.phase("try the task on one batch"):
        raise ValueError("by this rank")
    assert session.exchange(ValueError("by this rank"), "see who else fails", 3.0) is None
    assert late.asked == 1


def test_a_folder_that_could_be_written_before_may_be_again():
    """As after a ticket of Kerberos has expired: a run that has trained is tried again (70), a start is not (64)."""
    rank = Session(alone(), Group("errors"), StopSignals())
    error = NotAllowed("cannot write runs/a", "ask its owner")
    assert rank.fail(error, 0) == 64
    rank.reached(5)
    assert rank.fail(error, 0) == 70


def test_a_rank_that_mpi_does_not_connect_is_seen_and_its_log_has_its_stacks(tmp_path, monkeypatch):
    run = RunDir(tmp_path)
    run.create()
    for name, value in {RUN_DIR: str(tmp_path), ATTEMPT: "1", "PMIX_RANK": "3"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(session, "STACKS_S", 0.05)
    found: list[LastWord] = []

    def stands_still():
        wait_for("stacks", lambda: "stands_still" in run.log(3, 1).read_text())
        found.extend(collect(run, 1))
        return alone()

    monkeypatch.setattr(session, "connect", stands_still)
    rank = Session(alone(), Group("errors"), StopSignals(), verbose=True, supervised=True)
    rank.join()
    assert [(word.rank, word.joined) for word in found] == [(3, False)]
    assert [(word.rank, word.joined) for word in collect(run, 1)] == [(0, True)], "MPI's word counts"
