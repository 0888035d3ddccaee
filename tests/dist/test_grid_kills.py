"""Eight ranks in a grid: any rank that dies or hangs is named with its place, and another plan resumes the run.

``HPCTRAIN_GRID_KILLS=all`` kills each of the eight ranks once.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpctrain import CheckpointStore
from tests.support.command import ONE_ATTEMPT, events, hpctrain, last_words, write_run

TASK = Path(__file__).parent / "programs" / "grid_trouble_task.py"
STEPS, DIES_AT = 16, 5
"""Number of steps, and the earliest step at which a rank is killed, after the first checkpoint is complete."""
GRID = {"tensor": 2, "pipeline": 2}
"""Plan of the eight ranks; two of them see different samples."""
VICTIMS = {"all": range(8)}.get(os.environ.get("HPCTRAIN_GRID_KILLS", ""), [1, 6])
OTHERS: list[tuple[int, dict[str, Any]]] = [(2, {"pipeline": 2}), (2, {"tensor": 2}), (1, {})]
"""Ranks and plans that resume the run."""

pytestmark = pytest.mark.world_size(8)


def run(
    folder: Path,
    ranks: int,
    plan: Mapping[str, Any],
    trouble: Mapping[str, Any] | None = None,
    code: int = 0,
    steps: int = STEPS,
) -> str:
    """Run one attempt to its end, and return its output."""
    file = write_run(
        folder,
        task=f"{TASK}:task",
        task_args={"folder": str(folder), **(trouble or {})},
        run_dir=str(folder / "run"),
        train={"steps": steps, "global_batch": 12, "accumulate": 2, "clip_norm": 0.5},
        checkpoint={"every_steps": 2},
        parallel=dict(plan),
        reduce={"kind": "mpi" if ranks > 1 else "none"},
        monitor={"hang_s": 10.0} if (trouble or {}).get("kind") == "hang" else {},
        track={"every_steps": 1},
        launch=ONE_ATTEMPT,
    )
    return hpctrain("run", "-n", ranks, file, code=code, timeout=200, warm="torch").output


@pytest.fixture(scope="module")
def unharmed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Folder of an undisturbed run in one process; made once."""

    @functools.cache
    def made() -> Path:
        folder = tmp_path_factory.mktemp("one")
        run(folder, 1, {})
        return folder

    return made


def losses(folder: Path) -> dict[int, float]:
    """Loss by step; of repeated steps, the last one counts."""
    return {event["step"]: event["loss"] for event in events(folder / "run", "train")}


@pytest.mark.parametrize("victim", VICTIMS)
def test_any_rank_is_killed_and_another_plan_goes_on(unharmed, tmp_path, victim):
    trouble = {"kind": "kill", "rank": victim, "step": DIES_AT}
    said = run(tmp_path, 8, GRID, trouble, code=70)
    place = f"(stage {victim // 4}, data {victim // 2 % 2}, tensor {victim % 2})"
    assert f"rank {victim} {place} on " in said and "SIGKILL" in said
    assert [word["rank"] for word in last_words(tmp_path / "run") if word["ending"] == "killed"] == [victim]
    ranks, plan = OTHERS[victim % len(OTHERS)]
    run(tmp_path, ranks, plan, trouble)
    [resumed] = events(tmp_path / "run", "resumed")
    assert 2 <= resumed["step"] < STEPS
    wanted = losses(unharmed())
    assert list(wanted) == list(range(1, STEPS + 1))
    np.testing.assert_allclose([losses(tmp_path)[step] for step in wanted], [*wanted.values()], rtol=0, atol=1e-12)
    found, whole = (CheckpointStore(one / "run" / "checkpoints").load(STEPS).arrays for one in (tmp_path, unharmed()))
    names = [name for name in whole if name.startswith(("model/", "optimizer/"))]
    assert len(names) > 40
    for name in names:
        np.testing.assert_allclose(found[name], whole[name], rtol=0, atol=1e-12, err_msg=name)


def test_a_stage_that_hangs_is_named(tmp_path):
    trouble = {"kind": "hang", "rank": 5, "step": DIES_AT}
    said = run(tmp_path, 8, GRID, trouble, code=70, steps=1000)  # it hangs once a checkpoint is complete
    [hang] = events(tmp_path / "run", "hang")
    assert [rank["rank"] for rank in hang["ranks"]] == [5]
    assert "rank 5 (stage 1, data 0, tensor 1)" in said
