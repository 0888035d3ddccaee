"""Embedding tables split by rows over data-parallel ranks: same numbers as one process, part of the tables on each
rank, and checkpoints that can be resumed under any other plan."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpctrain import CheckpointStore
from hpctrain.checkpoint.verify import verify_checkpoint
from tests.support.command import hpctrain
from tests.support.mpi import ROOT, printed
from tests.support.plan_runs import predictions, require_near, require_same_state, state_of
from tests.tasks.table_tasks import ROWS, WIDTH

RUNS = ("adamw", "few", "weighted", "sparse-adam", "adagrad", "sgd", "momentum")

pytestmark = pytest.mark.world_size(4)
Found = dict[str, Any]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], tuple[Path, Found]]:
    """Folder of all runs, and their results; launched once."""

    @functools.cache
    def launched() -> tuple[Path, Found]:
        folder = tmp_path_factory.mktemp("tables")
        results: Found = {}
        for part, ranks in {"first": 1, "four": 4, "two": 2, "last": 1}.items():
            results |= printed(ranks, "torch_tables.py", folder, part, timeout=300, warm="torch")
        return folder, results

    return launched


@pytest.mark.parametrize("name", [*(f"{run}-{ranks}" for run in RUNS for ranks in (2, 4)), "horovod-4", "recomputed-4"])
def test_numbers_are_those_of_one_process(found: Callable[[], tuple[Path, Found]], name: str) -> None:
    """Losses and all state after 6 updates, with accumulation, clipping, averages, and weight decay of tables only."""
    folder, results = found()
    of = name.rpartition("-")[0]
    one = f"{of if of in RUNS else 'adamw'}-1"
    assert "error" not in results[name]
    require_near(results[name]["losses"], results[one]["losses"])
    assert len(results[name]["losses"]) == 6
    require_near(results[name]["metrics"]["loss"], results[one]["metrics"]["loss"])
    require_same_state(folder, name, one)


SLOTS = {"adamw": ("exp_avg", "exp_avg_sq"), "sparse-adam": ("exp_avg", "exp_avg_sq"), "adagrad": ("sum",), "sgd": ()}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("optimizer", SLOTS)
def test_each_rank_has_its_rows_and_no_others(
    found: Callable[[], tuple[Path, Found]], optimizer: str, ranks: int
) -> None:
    """23 rows are split into 6, 6, 6 and 5; 3 rows into 1, 1, 1 and none."""
    held = found()[1][f"{optimizer}-{ranks}"]["held"]
    for name, rows in ROWS.items():
        share = -(-rows // ranks)
        own = [max(0, min(share, rows - rank * share)) * WIDTH for rank in range(ranks)]
        for tensor in (name, *(f"{name}.{slot}" for slot in SLOTS[optimizer])):
            assert [each[tensor] for each in held] == own
        assert sum(own) == rows * WIDTH


def test_tables_take_no_part_in_sums(found: Callable[[], tuple[Path, Found]]) -> None:
    """Except for the one that is not marked."""
    results = found()[1]
    deep = 6 * WIDTH * 8 + 8 + 8 + 1
    assert results["adamw-4"]["summed"] == 4 * (deep + 7 * WIDTH)
    assert results["adamw-1"]["summed"] == 4 * (deep + (7 + sum(ROWS.values())) * WIDTH)


def test_a_run_goes_on_at_any_other_plan(found: Callable[[], tuple[Path, Found]]) -> None:
    """One process, tables split on 4 ranks, whole, split, a sharded optimizer, tables split on 2, one process."""
    folder, results = found()
    losses = [loss for step in range(1, 8) for loss in results[f"chain-{step}"]["losses"]]
    wanted = results["adamw-1"]["losses"] + results["adamw-1-7"]["losses"]
    require_near(losses, wanted)
    require_same_state(folder, "chain", "adamw-1", 7)
    assert [results[f"chain-{step}"]["reducer"] for step in (4, 5)] == ["mpi-node", "mpi-sharded"]


def test_a_resume_repeats_the_same_bits(found: Callable[[], tuple[Path, Found]]) -> None:
    folder, results = found()
    assert results["begun"]["losses"] + results["ended"]["losses"] == results["adamw-4"]["losses"]
    mine, wanted = state_of(folder, "again", 6), state_of(folder, "adamw-4", 6)
    assert all(np.array_equal(mine[key], wanted[key]) for key in wanted)


def test_initial_weights_are_cut_as_they_are_read(found: Callable[[], tuple[Path, Found]]) -> None:
    """Also for a model that no rank has ever held as a whole."""
    folder, results = found()
    require_near(results["initial-4"]["losses"], results["initial-1"]["losses"])
    assert results["initial-4"]["losses"][0] < results["adamw-4"]["losses"][3]
    require_same_state(folder, "initial-4", "initial-1", 1)
    assert results["valueless"]["losses"] == results["initial-4"]["losses"]
    require_same_state(folder, "valueless", "initial-1", 1)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_stays_near(found: Callable[[], tuple[Path, Found]], precision: str) -> None:
    results = found()[1]
    np.testing.assert_allclose(results[precision]["losses"], results["sparse-adam-1"]["losses"][:2], rtol=0.02)


def test_what_all_have_alike_is_verified(found: Callable[[], tuple[Path, Found]]) -> None:
    assert "after step 2 the weights of rank 3 differ from those of rank 0" in found()[1]["drifted"]["error"]


def test_a_rank_hashes_the_rows_that_it_has(found: Callable[[], tuple[Path, Found]]) -> None:
    """According to its last words; the hash of replicated state is the same on each."""
    results = found()[1]
    own, shared = zip(*results["adamw-4"]["hashes"], strict=True)
    assert len(set(shared)) == 1 and len({*own, *shared}) == 5


@pytest.mark.world_size(2)
def test_an_index_that_no_rank_has_ends_the_run_with_a_sentence(tmp_path: Path) -> None:
    """The index occurs on the second rank in the second update."""
    given = {"name": "no", "task": f"{ROOT}/tests/tasks/table_tasks.py:outside", "parallel": {"shard": "tables"}}
    (tmp_path / "run.yaml").write_text(json.dumps(given | {"train": {"steps": 2, "global_batch": 8}}))
    done = hpctrain("run", "-n", 2, "run.yaml", cwd=tmp_path, warm="torch", code=None)
    assert done.returncode
    assert re.search(rf"index out of range in tables.users: \d+ to {ROWS['users']}", done.output)


def test_checkpoints_are_whole_and_predictions_those_of_one_process(found: Callable[[], tuple[Path, Found]]) -> None:
    folder, _ = found()
    assert verify_checkpoint(CheckpointStore(folder / "adamw-4" / "checkpoints"), 6).problems == ()
    predicted = [predictions(folder, name) for name in ("adamw-4", "adamw-1")]
    assert len(predicted[0]) == 40
    require_near(*predicted)


def test_what_cannot_be_shared_out_is_refused(found: Callable[[], tuple[Path, Found]]) -> None:
    results = found()[1]
    assert "Adafactor does not update each element of tables.users.weight" in results["adafactor"]["error"]
    assert "tensor= of the task marks no table by hpctrain.vocabulary" in results["unmarked"]["error"]
    assert "tables.users.weight is used, and each rank has different rows" in results["penalised"]["error"]
