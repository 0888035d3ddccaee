"""What ``hpctrain plan`` says of a rank's memory beside the peak of the tensors that exist in an update."""

import pytest

from tests.support.mpi import printed

pytestmark = pytest.mark.world_size(4)


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_plan_is_within_a_tenth_of_its_peak(ranks):
    found = printed(ranks, "planned_peaks.py", "mlp", warm="torch")
    assert len(found) == {2: 11, 4: 8}[ranks]
    for plan, one in found.items():
        assert one["planned"] == pytest.approx(max(one["peaks"]), rel=0.1), plan
