"""N ranks form one job: they split the data, hold the same weights, and exchange gradients."""

from __future__ import annotations

import json

import pytest

from hpctrain.errors import ExitCode
from tests.support.command import PROJECT, events, hpctrain, last_words, write_run

RECORDING = f"{PROJECT}/tests/tasks/torch_recording_task.py:task"


@pytest.mark.tour
@pytest.mark.world_size(2)
@pytest.mark.parametrize("framework", ["torch", "keras"])
def test_digits_train_on_two_ranks_with_horovod(framework, tmp_path):
    example = PROJECT / f"examples/digits-{framework}.yaml"
    hpctrain("run", "-n", 2, example, "--reduce.kind", "horovod", cwd=tmp_path, timeout=300)
    run = tmp_path / "runs" / f"digits-{framework}"
    (started,) = events(run, "run_started")
    assert (started["ranks"], started["reducer"]) == (2, "horovod")
    assert events(run, "eval")[-1]["metrics"]["accuracy"] >= 0.95
    words = last_words(run)
    assert [word["ending"] for word in words] == ["completed"] * 2
    assert len({word["weights_hash"] for word in words}) == 1


@pytest.mark.tour
@pytest.mark.world_size(3)
@pytest.mark.parametrize("ranks", [1, 3])
def test_ranks_see_disjoint_parts_of_all_samples_in_the_same_global_order(ranks, tmp_path):
    run = write_run(
        tmp_path,
        task=RECORDING,
        task_args={"folder": str(tmp_path)},
        train={"epochs": 2, "global_batch": 12},
        reduce={"kind": "mpi"} if ranks > 1 else {},
    )
    hpctrain("run", "-n", ranks, run, cwd=tmp_path, warm="torch")
    seen = {
        int(path.name.split("-")[1]): [list(map(int, line.split())) for line in path.read_text().splitlines()]
        for path in tmp_path.glob("seen-*")
    }
    assert sorted(seen) == list(range(ranks))
    steps = [[sample for rank in sorted(seen) for sample in seen[rank][step]] for step in range(10)]
    for epoch in (steps[:5], steps[5:]):
        assert [len(batch) for batch in epoch] == [12, 12, 12, 12, 5]
        assert sorted(sample for batch in epoch for sample in batch) == list(range(53))
    assert steps == EXPECTED.setdefault("steps", steps), "the order depends on the number of ranks"


EXPECTED: dict[str, list[list[int]]] = {}
"""Samples seen by the first number of ranks; the other one must see the same."""


@pytest.mark.world_size(2)
def test_horovods_own_timeline_shows_the_gradients_bytes(tmp_path):
    timeline = tmp_path / "timeline.json"
    run = write_run(
        tmp_path,
        task="hpctrain.tasks.torch_digits:task",
        train={"steps": 5, "global_batch": 64},
        reduce={"kind": "horovod"},
    )
    hpctrain("run", "-n", 2, run, cwd=tmp_path, env={"HOROVOD_TIMELINE": str(timeline)}, warm="torch")
    text = timeline.read_text().rstrip().rstrip(",")
    entries = json.loads(text if text.endswith("]") else text + "]")
    reduced = [entry for entry in entries if str(entry.get("name", "")).endswith("ALLREDUCE") and entry["ph"] == "B"]
    assert len(reduced) >= 5, f"Horovod reduced nothing: {sorted({str(entry.get('name')) for entry in entries})}"


@pytest.mark.world_size(2)
def test_without_the_exchange_the_ranks_drift_apart_and_the_run_ends(tmp_path):
    """Without it, the weights must differ: the exchange is what keeps them equal."""
    sabotage = tmp_path / "sabotage.py"
    sabotage.write_text(
        "from hpctrain.reduce import mpi_allreduce, shm_allreduce\n"
        "from tests.tasks.torch_recording_task import task  # noqa: F401\n"
        "for module in (mpi_allreduce, shm_allreduce):\n"
        "    for kind in list(vars(module).values()):\n"
        "        for name in ('start', 'finish'):\n"
        "            if isinstance(kind, type) and kind.__module__ == module.__name__ and hasattr(kind, name):\n"
        "                setattr(kind, name, lambda self, *args, **kwargs: None)\n"
    )
    run = write_run(
        tmp_path,
        task=f"{sabotage}:task",
        task_args={"folder": str(tmp_path)},
        train={"epochs": 1, "global_batch": 12},
        reduce={"kind": "mpi"},
    )
    done = hpctrain("run", "-n", 2, run, cwd=tmp_path, warm="torch", code=ExitCode.DO_NOT_REQUEUE)
    assert "after step 1 the weights of rank 1 differ from those of rank 0" in done.output
