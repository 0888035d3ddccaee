"""Runs with checkpoints of format 1, in tests/support/format_1, resume as if they had never stopped."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from hpctrain.checkpoint.store import CheckpointStore
from tests.support.command import PROJECT, events, hpctrain

OLD = PROJECT / "tests/support/format_1"
BEFORE_NORM = {
    "torch": {"model/0.weight", "model/0.bias", "model/1.running_mean", "model/1.running_var"},
    "keras": {
        "model/dense/kernel",
        "model/dense/bias",
        "model/batch_normalization/moving_mean",
        "model/batch_normalization/moving_variance",
    },
}
"""The layer before BatchNorm, and the statistics of its outputs. Their scale and shift do not affect the loss, so that
gradients are rounding errors, which differ between processors, and by which Adam takes full steps."""
FREE = 2 * 6 * 0.01
"""How far two runs can diverge there: six updates at the learning rate, in opposite directions."""


@pytest.mark.world_size(2)
@pytest.mark.parametrize("run", ["torch", "keras"])
def test_the_run_ends_where_the_program_that_saved_it_would_have_ended(run: str, tmp_path: Path) -> None:
    if find_spec(run) is None:
        pytest.skip(f"{run} is not installed")
    folder = shutil.copytree(OLD, tmp_path / "old")
    hpctrain(
        "run",
        "-n",
        2,
        f"{run}.yaml",
        "--train.steps",
        "12",
        cwd=folder,
        warm="torch" if run == "torch" else "tensorflow",
    )
    assert events(folder / run, "resumed")[-1]["step"] == 6
    store = CheckpointStore(folder / run / "checkpoints")
    loaded, expected = store.load(), np.load(OLD / f"{run}-12.npz")
    assert loaded.step == 12 and store.manifest(12).shards[0].has_index
    for name in expected.files:  # saved at step 12 on two ranks; statistics are the mean of both
        atol = FREE if name in BEFORE_NORM[run] else 1e-6
        np.testing.assert_allclose(loaded.arrays[name], expected[name], rtol=1e-5, atol=atol, err_msg=name)
    assert BEFORE_NORM[run] < set(expected.files)
