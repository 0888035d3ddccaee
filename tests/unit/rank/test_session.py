"""Errors that ranks exchange."""

from __future__ import annotations

from typing import Any

import pytest

from hpctrain.comm.group import Group
from hpctrain.comm.world import alone
from hpctrain.errors import RunFailed
from hpctrain.rank.session import Session
from hpctrain.rank.stop_requests import StopSignals


class Late(Group):
    """A group whose other ranks do not arrive in time; their next exchange would meet the one that was given up."""

    asked = 0

    def allgather(self, value: Any, what: str = "", timeout_s: float = 0.0) -> list[Any]:
        self.asked += 1
        raise RunFailed(f"rank 0 waited {timeout_s} s for the other ranks to {what}", "none")


def test_after_an_exchange_that_was_given_up_there_is_no_other() -> None:
    late = Late("errors")
    session = Session(alone(), late, StopSignals())
    with pytest.raises(ValueError, match="by this rank"), session.phase("try the task on one batch"):
        raise ValueError("by this rank")
    assert session.exchange(ValueError("by this rank"), "see who else fails", 3.0) is None
    assert late.asked == 1
