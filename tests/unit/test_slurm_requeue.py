"""When a job may be put back into the queue."""

from __future__ import annotations

import pytest

from hpctrain.launch.slurm.requeue import is_ending


@pytest.mark.parametrize(
    ("state", "reason", "expected"),
    [
        ("RUNNING", "None", False),
        ("CANCELLED", "None", True),
        ("PREEMPTED", "None", True),
        ("COMPLETING", "None", True),
        ("COMPLETING", "TimeLimit", False),
        ("COMPLETING", "NodeFail", False),
    ],
)
def test_a_job_that_somebody_ends_is_told_from_one_at_its_time_limit(state: str, reason: str, expected: bool) -> None:
    assert is_ending({"JobState": state, "Reason": reason}) is expected


def test_a_job_that_slurm_has_forgotten_is_not_ending() -> None:
    assert not is_ending({})
