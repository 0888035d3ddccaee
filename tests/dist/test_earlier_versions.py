"""A two-rank run of version 0.1, killed once and then stopped, can be shown, verified, resumed and reported."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from hpctrain.errors import Code
from hpctrain.run.view import RunView
from tests.support.command import PROJECT, endings, events, hpctrain, last_words

OLD = PROJECT / "tests/support/two_ranks_of_0_1"


@pytest.mark.tour
@pytest.mark.world_size(2)
def test_a_run_of_version_0_1_is_told_of_and_resumed(tmp_path: Path) -> None:
    folder = shutil.copytree(OLD, tmp_path / "old")
    run = folder / "run"
    first, second = RunView(run).snapshot().attempts
    assert first.verdict is not None and first.verdict.code is Code.KILLED and first.verdict.rank == 1
    assert second.verdict is not None and (second.verdict.action.value, second.to_step) == ("stop", 32)
    assert json.loads(hpctrain("explain", run, "--json").stdout)["cause"] == "stopped"
    hpctrain("ckpt", "verify", run)
    hpctrain("run", "-n", 2, "run.yaml", cwd=folder, warm="torch")
    assert [event["step"] for event in events(run, "resumed")] == [4, 32]
    assert [event["step"] for event in events(run, "train")] == list(range(1, 41)), "none is missing, none counts twice"
    assert endings(run, 3) == ["completed"] * 2
    assert len({word["weights_hash"] for word in last_words(run, 3)}) == 1
    report = json.loads(hpctrain("report", run, "--json").stdout)
    assert len(report["attempts"]) == 3
    assert json.loads(hpctrain("explain", run, "--json").stdout)["cause"] == "completed"
