"""A run folder of version 0.1, in tests/support/run_of_0_1, is resumed as if its version had written it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from hpctrain.checkpoint.object_state import OBJECTS, saved_texts
from hpctrain.checkpoint.store import CheckpointStore
from hpctrain.train.stateful import HOOKS
from hpctrain.train.tree import HostLeaves, tree_value
from tests.support.command import PROJECT, events, hpctrain

OLD = PROJECT / "tests/support/run_of_0_1"


def states(run: Path) -> dict[str, Any]:
    """State of hooks in the newest checkpoint."""
    loaded = CheckpointStore(run / "checkpoints").load()
    if OBJECTS not in loaded.meta:
        return {name: json.loads(text) for name, text in saved_texts(loaded.meta).items()}
    found = {}
    for name in loaded.meta[OBJECTS]:
        arrays = {key.removeprefix(f"{name}/"): array for key, array in loaded.arrays.items() if key.startswith(name)}
        found[name.removeprefix(HOOKS)] = tree_value(arrays, HostLeaves(), name)
    return found


def test_best_values_and_counts_of_version_0_1() -> None:
    assert states(OLD / "run") == {
        "early_stop": {"metric": "loss", "mode": "min", "best": 0.44666117429733276, "evaluations_since_best": 2},
        "checkpoint": {"metric": "loss", "mode": "min", "best": 0.2606917526572943},
    }


@pytest.mark.slow
def test_a_run_of_version_0_1_is_resumed(tmp_path: Path) -> None:
    """It stopped early; with more patience it trains one epoch more, which counts from where it was."""
    folder = shutil.copytree(OLD, tmp_path / "old")
    before = states(folder / "run")["checkpoint"]["best"]
    hpctrain("train", "run.yaml", cwd=folder, warm="torch")
    assert events(folder / "run", "run_finished")[-1]["reason"] == "early_stop"
    assert events(folder / "run", "run_finished")[-1]["steps"] == 0
    hpctrain("train", "run.yaml", "--train.early_stop.patience", "3", cwd=folder, warm="torch")
    assert events(folder / "run", "run_finished")[-1]["steps"] == 4
    assert states(folder / "run")["early_stop"]["evaluations_since_best"] == 3
    assert states(folder / "run")["checkpoint"]["best"] <= before
