"""Not verified (needs TensorFlow built for GPUs): Keras trains on a GPU as on the CPU, with one rank and several."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.mpi import printed

pytestmark = pytest.mark.gpu


def run(ranks: int, *scenarios: str, **environment: str) -> Any:
    """Results by scenario."""
    tf = pytest.importorskip("tensorflow")
    if not tf.test.is_built_with_cuda():
        pytest.skip("this TensorFlow is built for CPUs")
    environment["TF_FORCE_GPU_ALLOW_GROWTH"] = "true"
    return printed(ranks, "tensorflow_training.py", *scenarios, env=environment)


def test_a_gpu_trains_as_the_cpu_does():
    scenarios = ("auto", "clip", "weighted", "accumulate")
    on_gpu = run(1, *scenarios)
    on_cpu = run(1, *scenarios, CUDA_VISIBLE_DEVICES="")
    for name in scenarios:
        np.testing.assert_allclose(on_gpu[name]["losses"], on_cpu[name]["losses"], rtol=1e-3)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("scenario", ["auto", "mpi"])
def test_ranks_that_share_a_gpu_reduce_over_mpi(scenario):
    found = run(2, scenario, CUDA_VISIBLE_DEVICES="0")[scenario]
    wanted = run(1, "auto", CUDA_VISIBLE_DEVICES="")["auto"]
    assert len(set(found["hashes"])) == 1
    np.testing.assert_allclose(found["losses"], wanted["losses"], rtol=1e-3)
