"""Every layer and module that holds weights, and models of many kinds, train on ranks as one process does.

Runs on 2 ranks, or on ``HPCTRAIN_SWEEP_RANKS``.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import pytest

from tests.support.mpi import printed

RANKS = int(os.environ.get("HPCTRAIN_SWEEP_RANKS", "2"))
LIMIT_S = 600 if RANKS <= 2 else 1500
"""Keras' models take 150 s of processor; other tests may run beside this one."""
OWN_STATISTICS = {"BatchNormalization", *(f"{lazy}BatchNorm{axes}d" for lazy in ("", "Lazy") for axes in (1, 2, 3))}
"""Layers that normalise over each rank's part of the batch, as docs/numerics.md says."""

pytestmark = pytest.mark.world_size(RANKS)


@functools.cache
def swept(framework: str) -> dict[str, Any]:
    """Result of the sweep for each model, and classes that it lacks."""
    found: dict[str, Any] = printed(RANKS, f"{framework}_sweep.py", timeout=LIMIT_S, warm=framework)
    return found


def is_right(name: str, found: dict[str, Any]) -> bool:
    """Whether a model was trained correctly."""
    near = found["difference"] is not None and found["difference"] <= found["accuracy"]
    return (near or name in OWN_STATISTICS) and found["equal"] and found["moved"]


@pytest.mark.timeout(LIMIT_S + 20)
@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_ranks_train_as_one_process_does(framework):
    found = swept(framework)["found"]
    wrong = [f"{name}: {each}" for name, each in found.items() if not is_right(name, each)]
    assert len(found) > 60 and not wrong, "\n".join(wrong)


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_every_class_with_weights_has_a_case(framework):
    assert swept(framework)["missing"] == [], f"add them to tests/tasks/{framework}_*.py"


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_statistics_of_each_ranks_part_do_matter(framework):
    found = swept(framework)["found"]
    own = [found[name] for name in OWN_STATISTICS & found.keys()]
    assert own and all(each["difference"] > 5 * each["accuracy"] for each in own), "far more than rounding"
