"""Tensor-parallel models train as one process does, and their checkpoints can be resumed under any other plan."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpctrain import CheckpointStore
from hpctrain.checkpoint.verify import verify_checkpoint
from hpctrain.cli import main
from tests.support.mpi import printed
from tests.support.plan_runs import predictions, require_near, require_same_state

EXACT = ("horovod", "auto", "all-four", "adagrad", "sharded", "sharded-fused", "sharded-adagrad")

pytestmark = pytest.mark.world_size(4)
Found = dict[str, Any]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], tuple[Path, Found]]:
    """Folder of all runs, and their results; launched once."""

    @functools.cache
    def launched() -> tuple[Path, Found]:
        folder = tmp_path_factory.mktemp("plans")
        (folder / "text.txt").write_text("".join(map(str, range(60))))
        assert main(["data", "pack", f"{folder}/text.txt", "-o", f"{folder}/tokens.h5", "--context", "9"]) == 0
        results: Found = {}
        for ranks in (4, 1):
            results |= printed(ranks, "tensor_training.py", folder, timeout=300, warm="torch")
        return folder, results

    return launched


def wanted_of(name: str) -> str:
    """Name of the one-process run that a run must match."""
    return "alone-adagrad" if name.endswith("adagrad") else "adamw"


def begins_of(store: CheckpointStore, step: int, name: str, axis: int) -> set[int]:
    """Where the pieces of a tensor begin along an axis."""
    pieces = [stored.piece for shard in store.manifest(step).shards for stored in shard.pieces]
    return {piece.box.begin[axis] for piece in pieces if piece.tensor.name == name}


@pytest.mark.parametrize("name", EXACT)
def test_cut_layers_train_as_whole_ones_do(found, name):
    """With accumulation, clipping, weight decay on matrices only, moving averages, tied and fused weights."""
    folder, results = found()
    one = results[wanted_of(name)]
    require_near(results[name]["losses"], one["losses"])
    assert len(results[name]["losses"]) == 6
    require_near(results[name]["metrics"]["loss"], one["metrics"]["loss"])
    require_same_state(folder, name, wanted_of(name), least=80)


@pytest.mark.parametrize(("name", "whole"), [("gpt-2", "gpt"), ("gpt-4", "gpt-plain"), ("gpt-stages", "gpt-plain")])
def test_the_ready_gpt_trains_as_in_one_process(found, name, whole):
    """Grouped heads, SwiGLU, tied and untied ends, a loss with classes split over ranks, and a pipeline of it."""
    folder, results = found()
    require_near(results[name]["losses"], results[whole]["losses"])
    assert len(results[name]["losses"]) == 6
    for metric in ("loss", "accuracy"):
        mine, others = (results[one]["metrics"][metric] for one in (name, whole))
        require_near(mine, others)
    require_same_state(folder, name, whole, least=40)


@pytest.mark.parametrize(("name", "tensor"), [("horovod", 2), ("auto", 2), ("all-four", 4), ("sharded", 2)])
def test_what_is_not_cut_stays_equal_bit_for_bit(found, name, tensor):
    hashes = found()[1][name]["hashes"]
    assert len({shared for _, shared in hashes}) == 1
    assert [own for own, _ in hashes[tensor:]] == [own for own, _ in hashes[:-tensor]]
    assert len({own for own, _ in hashes}) == tensor


def test_every_plan_goes_on_where_another_one_stopped(found):
    """Two ranks per model, four, one, two, and one process: same samples, and same final state."""
    folder, results = found()
    losses = [loss for step in range(2, 7) for loss in results[f"chain-{step}"]["losses"]]
    require_near(losses, results["adamw"]["losses"])
    require_same_state(folder, "chain", "adamw", least=80)
    store = CheckpointStore(folder / "chain" / "checkpoints")
    assert verify_checkpoint(store, 2).problems == ()
    for step in range(2, 7):
        for kind in ("model", "ema", "optimizer/exp_avg"):
            assert begins_of(store, step, f"{kind}/blocks.0.down.weight", 1) == set(range(0, 64, 8))
            assert begins_of(store, step, f"{kind}/blocks.1.qkv.weight", 0) == set(range(0, 3 * 16, 2))


@pytest.mark.parametrize("end", ["chain", "fork"])
def test_optimizers_that_are_cut_twice_go_on_at_every_other_plan(found, end):
    """Two ranks per model with a sharded optimizer, before and after four ranks per model, whole models with a sharded
    optimizer, and whole ones on four ranks or in one process."""
    folder, results = found()
    names = [*(f"sharded-chain-{step}" for step in range(1, 6)), f"sharded-{end}-6"]
    losses = [loss for name in names for loss in results[name]["losses"]]
    require_near(losses, results["adamw"]["losses"])
    require_same_state(folder, f"sharded-{end}", "adamw", least=80)
    assert verify_checkpoint(CheckpointStore(folder / "sharded-chain" / "checkpoints"), 5).problems == ()


def test_each_rank_has_its_share_of_what_its_group_has(found):
    """Half of AdamW's two moments, up to half a row of each at the cut."""
    results = found()[1]
    whole, halves = results["horovod"]["slots"], results["sharded"]["slots"]
    row = 4 * 16 // 2
    assert all(abs(half - whole[0] / 2) <= row for half in halves)
    assert halves[0] == halves[1] and halves[2] == halves[3], "of a group, all ranks have the same rows"


def test_initial_weights_are_cut_as_they_are_read(found):
    folder, results = found()
    require_near(results["initial"]["losses"], results["alone-initial"]["losses"])
    assert results["initial"]["losses"][0] < results["adamw"]["losses"][3]
    require_same_state(folder, "initial", "alone-initial", 1, least=80)


def test_predictions_are_written_once(found):
    """The first rank of each tensor group writes them; all compute them."""
    folder, _ = found()
    predicted = [predictions(folder, name) for name in ("all-four", "horovod", "adamw")]
    for each in predicted[:2]:
        require_near(each, predicted[2])


def test_dropout_differs_where_values_are_cut_and_nowhere_else(found):
    drawn = found()[1]["noisy"]["drawn"]
    first, second, third, fourth = drawn["outer"]
    assert first == second != third == fourth
    assert "1" in first and "0" in first
    assert len(set(drawn["inner"])) == 4


def test_random_streams_go_on_after_a_resume(found):
    results = found()[1]
    assert results["begun"]["losses"] + results["ended"]["losses"] == results["noisy"]["losses"]
    assert results["ended"]["hashes"] == results["noisy"]["hashes"]


def test_low_precision_stays_near(found):
    results = found()[1]
    np.testing.assert_allclose(results["bf16"]["losses"], results["adamw"]["losses"][:3], rtol=0.02)


def test_what_would_train_wrongly_is_refused(found):
    results = found()[1]
    assert "the gradient of blocks.0.inner_norm.weight differs between ranks" in results["inner-norm"]["error"]
    assert "the gradient of blocks.1.inner_norm.bias differs between ranks" in results["sharded-inner-norm"]["error"]
    assert "in update 1 the losses of ranks of one model differ: " in results["ungathered"]["error"]
    assert "after step 2 the weights of rank 1, 3 differ from those of rank 0" in results["drifted"]["error"]
    assert "parallel.tensor is 3, and 4 ranks do not divide into groups of that size" in results["uneven"]["error"]
    assert "a rank has only some outputs of a layer with columns" in results["part"]["error"]
