"""Faults drawn from a fixed seed leave no trace in a run: samples, losses and weights match an undisturbed one.

``HPCTRAIN_CHAOS`` sets the number of faults of each plan; without it, two plans get five each.
"""

import os

import pytest

from tests.chaos.faults import PLANS, chaos
from tests.support.netns import NotPermitted

FAULTS = int(os.environ.get("HPCTRAIN_CHAOS", "0"))
SEED = int(os.environ.get("HPCTRAIN_SEED", "1"))


@pytest.mark.world_size(3)
@pytest.mark.timeout(300 + 30 * FAULTS)
@pytest.mark.parametrize("plan", PLANS if FAULTS else ["torch", "keras"])
def test_faults_leave_no_trace(tmp_path, plan):
    try:
        assert chaos(tmp_path, plan, SEED, FAULTS or 5) == []
    except NotPermitted as error:
        pytest.skip(str(error))
