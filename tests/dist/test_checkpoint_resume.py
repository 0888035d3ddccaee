"""Interrupted and resumed runs end with the same results as uninterrupted ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpctrain.checkpoint.store import CheckpointStore
from hpctrain.run.folder import RunDir
from tests.support.command import events

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).parent / "programs" / "checkpoint_training.py"
TASK = {name: f"{ROOT}/tests/tasks/{name}_resume_task.py" for name in ("torch", "tensorflow")}
OWN_STEP = f"{ROOT}/tests/tasks/keras_own_steps.py:vae_task"
STEPS = 22
"""Steps of a run, 5 per epoch: batches of 24 from 112 samples, the last of 16. Resumes are in mid-epoch."""


class Runs:
    """Starts attempts of runs in a folder, and reads what their ranks recorded."""

    def __init__(self, mpirun: Callable[..., Any], folder: Path) -> None:
        self.mpirun = mpirun
        self.folder = folder

    def attempt(self, name: str, ranks: int, check: bool = True, **options: Any) -> Any:
        """Run one attempt."""
        program = [PROGRAM, self.folder / name, self.folder / f"{name}-records", json.dumps({"steps": STEPS} | options)]
        warm = "torch" if "torch" in options["task"] else "tensorflow"
        return self.mpirun(ranks, *program, check=check, timeout=150, warm=warm)

    def record(self, name: str, rank: int) -> list[dict[str, Any]]:
        """Lines recorded by a rank."""
        lines = (self.folder / f"{name}-records" / f"{rank}.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def losses(self, name: str, rank: int) -> dict[int, Any]:
        """Loss by step; checks that repeated steps had the same loss and samples."""
        found: dict[int, Any] = {}
        for line in self.record(name, rank):
            if "step" in line:
                assert found.setdefault(line["step"], (line["loss"], line["ids"])) == (line["loss"], line["ids"])
        return found

    def samples(self, name: str, ranks: int) -> dict[int, list[int]]:
        """Sample ids of each step over all ranks, in order."""
        found: dict[int, dict[int, list[int]]] = {}
        for rank in range(ranks):
            for line in self.record(name, rank):
                if "step" in line:
                    found.setdefault(line["step"], {})[rank] = line["ids"]
        return {step: [i for rank in sorted(of_rank) for i in of_rank[rank]] for step, of_rank in found.items()}

    def events(self, name: str, event: str) -> list[dict[str, Any]]:
        """Events of one kind."""
        return events(self.folder / name, event)


@pytest.fixture
def runs(mpirun: Callable[..., Any], tmp_path: Path) -> Runs:
    return Runs(mpirun, tmp_path)


TOUR = pytest.mark.tour
CASES = [
    pytest.param("torch", 1, {"task_args": {"optimizer": "momentum"}}, id="torch-1-momentum"),
    pytest.param(
        "torch", 2, {"precision": "fp16", "save": {"writers": "node"}}, id="torch-2-fp16-writers-node", marks=TOUR
    ),
    pytest.param("torch", 4, {"save": {"mode": "sync"}}, id="torch-4-sync"),
    pytest.param("torch", 2, {"task": f"{TASK['torch']}:holding"}, id="torch-2-held-state"),
    pytest.param("tensorflow", 2, {"task": f"{TASK['tensorflow']}:holding"}, id="keras-2-held-state"),
    pytest.param("torch", 2, {"task": f"{TASK['torch']}:declared"}, id="torch-2-declared-state"),
    pytest.param("tensorflow", 2, {"task": f"{TASK['tensorflow']}:declared"}, id="keras-2-declared-state"),
    pytest.param("tensorflow", 1, {"task_args": {"optimizer": "momentum"}}, id="keras-1-momentum"),
    pytest.param("tensorflow", 4, {"precision": "fp16", "save": {"writers": "node"}}, id="keras-4-fp16-writers-node"),
    pytest.param("tensorflow", 2, {"task": OWN_STEP, "whole_step": False}, id="keras-2-own-step", marks=TOUR),
]


@pytest.mark.world_size(4)
@pytest.mark.parametrize(("framework", "ranks", "options"), CASES)
def test_killed_and_resumed_ends_bit_for_bit_the_same(runs, framework, ranks, options):
    options = {"task": f"{TASK[framework]}:task", **options}
    runs.attempt("straight", ranks, **options)
    killed = runs.attempt("broken", ranks, check=False, kill_after=14, kill_rank=ranks - 1, **options)
    assert killed.returncode != 0
    runs.attempt("broken", ranks, **options)
    (resumed,) = runs.events("broken", "resumed")
    assert 9 <= resumed["step"] <= 12
    for rank in range(ranks):
        straight, broken = runs.record("straight", rank)[-1], runs.record("broken", rank)[-1]
        assert {name.split("/")[0] for name in straight["final"]} >= {"model", "optimizer", "ema", "rng"}
        assert straight == broken
        assert runs.losses("straight", rank) == runs.losses("broken", rank)
        assert len(runs.losses("straight", rank)) == STEPS


@pytest.mark.world_size(4)
@pytest.mark.parametrize("framework", [pytest.param("torch", marks=TOUR), "tensorflow"])
def test_other_numbers_of_ranks_see_the_same_samples(runs, framework):
    options = {"task": f"{TASK[framework]}:plain"}
    runs.attempt("straight", 4, **options)
    expected = runs.samples("straight", 4)
    for ranks, last in ((4, 6), (2, 11), (3, 16), (1, None)):
        runs.attempt("changing", ranks, stop_after=last, **options)
        seen = runs.samples("changing", ranks)
        begin = runs.events("changing", "resumed")[-1]["step"] if ranks != 4 else 0
        assert {step: ids for step, ids in seen.items() if step > begin and (last is None or step <= last)} == {
            step: ids for step, ids in expected.items() if step > begin and (last is None or step <= last)
        }
        for record in (runs.folder / "changing-records").glob("*.jsonl"):
            record.unlink() if ranks != 1 else None
    loss = {step: total for step, (total, _) in runs.losses("changing", 0).items()}
    of_four = [runs.losses("straight", rank) for rank in range(4)]
    for step, (total, weight) in loss.items():
        sums = [of_rank[step][0] for of_rank in of_four]
        assert total / weight == pytest.approx(sum(s for s, _ in sums) / sum(w for _, w in sums), rel=1e-3)


@pytest.mark.world_size(2)
def test_state_outside_of_the_model_goes_along_to_another_number_of_ranks(runs):
    options = {"task": f"{TASK['torch']}:holding"}
    saved = []
    for ranks, last in ((2, 5), (1, 8)):
        runs.attempt("run", ranks, stop_after=last, **options)
        saved.append(CheckpointStore(RunDir(runs.folder / "run").checkpoints).load(last).arrays)
    assert saved[0].keys() == {name for name in saved[1] if not name.startswith("rng/")}
    counts = [arrays["held/optimizer/dict/count/integers"][0] for arrays in saved]
    calls = [arrays["held/model/extra/2/integers"][0] for arrays in saved]
    assert counts == [5, 8] and calls == [10, 16]  # two micro-batches per step


@pytest.mark.world_size(2)
def test_state_that_each_rank_has_of_its_own_and_does_not_say_so_is_told_after_a_step(runs):
    told = runs.attempt("run", 2, check=False, task=f"{TASK['torch']}:unwrapped")
    assert "state 'lanes' of the task differs between ranks 0 and 1 after 1 steps" in told.output
    assert "PerRank" in told.output and not runs.events("run", "checkpoint_saved")


@pytest.mark.world_size(2)
@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_random_numbers_are_not_those_of_the_first_steps_again_at_another_number_of_ranks(runs, framework):
    options = {"task": f"{TASK[framework]}:drawing"}
    for ranks, last in ((2, 4), (1, 8)):
        runs.attempt("run", ranks, stop_after=last, **options)
    drawn = {step: total / weight for step, ((total, weight), _) in runs.losses("run", 0).items()}
    assert list(drawn) == list(range(1, 9))
    assert len({round(loss, 6) for loss in drawn.values()}) == 8, drawn


@pytest.mark.world_size(2)
def test_a_damaged_checkpoint_is_named_put_aside_and_does_not_change_the_end(runs):
    options = {"task": f"{TASK['torch']}:task"}
    runs.attempt("straight", 2, **options)
    runs.attempt("broken", 2, stop_after=14, **options)
    store = CheckpointStore(RunDir(runs.folder / "broken").checkpoints)
    older, newest = store.steps()[-2:]
    assert newest == 14
    shard = store.folder(newest) / "shard-00001-of-00002.h5"
    data = bytearray(shard.read_bytes())
    data[-100] ^= 4
    shard.write_bytes(data)
    runs.attempt("broken", 2, **options)
    (event,) = runs.events("broken", "resumed")
    assert event["step"] == older
    assert [one["step"] for one in event["rejected"]] == [14] and "is damaged" in event["rejected"][0]["reason"]
    assert list(store.path.glob("damaged-step-000000014-*"))
    for rank in range(2):
        assert runs.record("straight", rank)[-1] == runs.record("broken", rank)[-1]


@pytest.mark.world_size(2)
def test_a_changed_run_is_refused_once_and_fresh_begins_anew(runs):
    options = {"task": f"{TASK['torch']}:plain"}
    runs.attempt("run", 2, stop_after=5, **options)
    refused = runs.attempt("run", 2, check=False, batch=16, **options)
    assert refused.returncode != 0
    assert "global batch was 24 and is 16" in refused.output and "set train.global_batch to 24" in refused.output
    runs.attempt("run", 2, batch=16, fresh=True, **options)
    store = CheckpointStore(RunDir(runs.folder / "run").checkpoints)
    assert store.load().meta["state"]["samples"] == 16 * STEPS
    assert list(store.path.glob("superseded-step-000000005-*"))
    assert not runs.events("run", "resumed")


@pytest.mark.world_size(2)
def test_state_that_should_be_equal_and_is_not_is_told(runs):
    options = {"task": f"{TASK['torch']}:plain", "save": {"verify_replicated": True}}
    runs.attempt("good", 2, **options)
    bad = runs.attempt("bad", 2, check=False, **(options | {"task": f"{TASK['torch']}:unequal"}))
    assert bad.returncode != 0 and "tensors differ between ranks at step 3" in bad.output
