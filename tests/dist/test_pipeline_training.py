"""Pipeline stages train as one process does, and their checkpoints can be resumed under any other plan."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpctrain import CheckpointStore
from hpctrain.checkpoint import safetensors
from hpctrain.checkpoint.verify import verify_checkpoint
from hpctrain.cli import main
from tests.support.mpi import printed
from tests.support.plan_runs import predictions, require_near, require_same_state, state_of

ALONE = {
    **dict.fromkeys(("pp2-dp2", "pp4", "tp2-pp2", "sharded", "gathered", "chunks"), "alone"),
    "auto": "alone-unclipped",
    "adagrad": "alone-adagrad",
    "norms": "alone-norms",
    "tied": "alone-tied",
}
"""The run of one process that each run of four ranks must match."""

pytestmark = pytest.mark.world_size(4)
Found = dict[str, Any]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], tuple[Path, Found]]:
    """Folder of all runs, and their results; launched once."""

    @functools.cache
    def launched() -> tuple[Path, Found]:
        folder = tmp_path_factory.mktemp("stages")
        results: Found = {}
        for ranks in (4, 1):
            results |= printed(ranks, "pipeline_training.py", folder, timeout=300, warm="torch")
        return folder, results

    return launched


@pytest.mark.parametrize("name", ALONE)
def test_stages_train_as_one_process_does(found, name):
    """With uneven, few or no micro-batches, clipping, weight decay on matrices only, moving averages, and a loss that
    returns a sum and a weight."""
    folder, results = found()
    one = results[ALONE[name]]
    require_near(results[name]["losses"], one["losses"])
    require_near(results[name]["norms"], one["norms"])
    assert len(one["losses"]) == 6
    require_near(results[name]["metrics"]["loss"], one["metrics"]["loss"])
    require_same_state(folder, name, ALONE[name], least=30)


@pytest.mark.parametrize("name", ["pp2-dp2", "pp4", "tp2-pp2"])
def test_each_rank_has_the_parameters_of_its_stage(found, name):
    """Ranks of the same stage hold bitwise identical parameters, and the stages together hold the whole model."""
    ranks = found()[1][name]["ranks"]
    ((_, _, _, whole, _),) = found()[1]["alone"]["ranks"]
    places: dict[tuple[int, int], set[str]] = {}
    for stage, tensor, weights, _, _ in ranks:
        places.setdefault((stage, tensor), set()).add(weights)
    assert all(len(weights) == 1 for weights in places.values())
    if name != "tp2-pp2":
        of_stage = {stage: held for stage, _, _, held, _ in ranks}
        assert sum(of_stage.values()) == whole
        assert max(of_stage.values()) < 0.6 * whole


@pytest.mark.parametrize("name", ["again", "again-in-parts"])
def test_cut_layers_that_compute_again_train_to_the_same_bits(found, name):
    """Dropout differs between ranks of a tensor group; recomputed layers begin and end in or outside the cut part."""
    results = found()[1]
    assert results[name]["losses"] == results["kept"]["losses"]
    assert results[name]["ranks"] == results["kept"]["ranks"]
    assert results["kept"]["losses"] != results["tp2-pp2"]["losses"][:3], "something was dropped"


def test_all_reducers_work_in_the_data_group_of_each_stage(found):
    results = found()[1]
    assert {reducer for *_, reducer in results["pp2-dp2"]["ranks"]} == {"horovod-flat"}
    assert len({reducer for *_, reducer in results["auto"]["ranks"]}) == 1
    assert {reducer for *_, reducer in results["pp4"]["ranks"]} == {"none"}


def test_every_plan_goes_on_where_another_one_stopped(found):
    """Six stages on two ranks whose layers are sharded, one, two on each of two ranks, with cut layers, four, and one
    process: same samples and state."""
    folder, results = found()
    losses = [loss for step in range(2, 7) for loss in results[f"chain-{step}"]["losses"]]
    require_near(losses, results["alone"]["losses"])
    require_same_state(folder, "chain", "alone", least=30)
    assert verify_checkpoint(CheckpointStore(folder / "chain" / "checkpoints"), 2).problems == ()


def test_a_pass_through_one_of_several_stages_sums_its_layers_only(found):
    """Of three stages, two have a gathered layer; the rest belongs to the model, which each of 3 x 3 passes sums."""
    assert found()[1]["chain-2"]["sums"] == [3 * (3 + 2)] * 2


def test_passes_with_samples_of_other_ranks_leave_nothing(found):
    """Neither in buffers nor for backward passes that are under way, between passes of a rank's own samples."""
    folder, results = found()
    require_near(results["lent"]["losses"], results["alone-lent"]["losses"])
    states = [state_of(folder, name, 6) for name in ("lent", "alone-lent")]
    counted = [[state.pop(f"model/blocks.{block}.seen") for block in range(4)] for state in states]
    np.testing.assert_array_equal(2 * np.array(counted[0]), counted[1], err_msg="the mean of two ranks")
    for name, value in states[1].items():
        np.testing.assert_allclose(states[0][name], value, rtol=0, atol=1e-12, err_msg=name)


def test_exported_weights_are_those_of_the_whole_model(found, tmp_path):
    folder, _ = found()
    whole = CheckpointStore(folder / "pp4" / "checkpoints").load(6).arrays
    path = tmp_path / "weights.safetensors"
    assert main(["ckpt", "export", str(folder / "pp4"), "-o", str(path), "--no-ema"]) == 0
    arrays, _ = safetensors.read(path)
    assert sorted(arrays) == sorted(name[6:] for name in whole if name.startswith("model/"))
    for name in arrays:
        np.testing.assert_array_equal(arrays[name], whole[f"model/{name}"])


def test_initial_weights_go_to_their_stages(found):
    """Also by rows, of which ranks may have different numbers, to a model that was made on the meta device."""
    folder, results = found()
    require_near(results["unfilled"]["losses"], results["alone-initial"]["losses"])
    require_same_state(folder, "unfilled", "alone-initial", 1, least=30)
    require_near(results["initial"]["losses"], results["alone-initial"]["losses"])
    assert results["initial"]["losses"][0] < results["alone"]["losses"][3]
    require_same_state(folder, "initial", "alone-initial", 1, least=30)
    told = [json.loads(line) for line in (folder / "initial" / "events.jsonl").read_text().splitlines()]
    (event,) = [event for event in told if event["event"] == "initial_weights"]
    wanted = CheckpointStore(folder / "alone" / "checkpoints").load(6).arrays
    assert sorted(event["taken"]) == sorted(name[6:] for name in wanted if name.startswith("model/"))
    assert event["unexpected"] == event["missing"] == []


def test_predictions_are_those_of_the_last_stage(found):
    folder, _ = found()
    require_near(predictions(folder, "tp2-pp2"), predictions(folder, "alone"))


def test_dropout_differs_between_stages_and_goes_on_after_a_resume(found):
    results = found()[1]
    drawn = [bits for rank in results["noisy"]["drawn"] for bits in rank.values()]
    assert len(drawn) == 8  # four blocks on each of two data ranks
    assert len(set(drawn)) == 8
    assert results["begun"]["losses"] + results["ended"]["losses"] == results["noisy"]["losses"]
    assert results["ended"]["ranks"] == results["noisy"]["ranks"]
    assert results["ended"]["drawn"] == results["noisy"]["drawn"]


def test_layers_are_compiled_one_by_one(found):
    """In fp32, where sums have another order."""
    results = found()[1]
    np.testing.assert_allclose(results["compiled"]["losses"], results["alone-eager"]["losses"], rtol=1e-6)
    assert len(results["compiled"]["losses"]) == 2
    assert results["compiled"]["advice"] == []
    assert results["compiled"]["graphs"] > results["lent"]["graphs"] == 0
    assert "train.compile finds no layer" in results["norms"]["advice"][0]


def test_half_precision_stays_near(found):
    results = found()[1]
    np.testing.assert_allclose(results["fp16"]["losses"], results["alone"]["losses"][:3], rtol=0.02)
    assert results["fp16"]["norms"][0] == pytest.approx(results["alone"]["norms"][0], rel=0.02)


def test_what_would_train_wrongly_is_refused(found):
    results = found()[1]
    assert "after step 2 the weights of rank 3 differ from those of rank 2" in results["drifted"]["error"]
    assert "ranks 0 and 2, which are stages of one model, got different samples" in results["astray"]["error"]
    assert "parallel.pipeline is 4, and the model has 3 layers with parameters to train" in results["few"]["error"]
    assert (
        "a function in layers= of the task holds places itself, which parallel.shard replaces"
        in results["held"]["error"]
    )
