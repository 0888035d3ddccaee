"""Local training with outer steps (``sync.kind: local``), in both frameworks."""

import json

import pytest

from tests.support.command import PROJECT
from tests.support.mpi import mpirun

PROGRAM = PROJECT / "tests/dist/programs/local_training.py"

pytestmark = pytest.mark.world_size(2)


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_means_of_weights_train_as_means_of_gradients_do(framework, tmp_path):
    mpirun(2, PROGRAM, framework, tmp_path, warm=framework)
    found = {name: metrics["loss"] for name, metrics in json.loads((tmp_path / "found.json").read_text()).items()}
    exact = found.pop("every_step")
    apart = found.pop("apart")
    assert found.pop("apart_nccl") == apart
    assert found.pop("parts_nccl") == found.pop("parts")
    clipped = found.pop("clipped")
    assert found.pop("node_clipped") == pytest.approx(clipped, rel=1e-5)
    alike = ("mean", "node", "node_nccl", "warm", "accumulated")
    assert found == pytest.approx(dict.fromkeys(alike, exact), rel=1e-5)
    for other in (apart, clipped):
        assert abs(other - exact) > 1e-4 * exact, "what is compared is sensitive to training apart, and to clipping"
