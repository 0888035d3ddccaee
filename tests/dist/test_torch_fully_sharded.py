"""Parameters sharded by rows on real MPI ranks: same numbers as one process, part of the state on each rank, and
checkpoints that can be resumed under any other plan."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.support.mpi import printed

pytestmark = pytest.mark.world_size(4)
Results = Callable[[], Any]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Results of all scenarios, run once."""

    @functools.cache
    def run() -> Any:
        folder = tmp_path_factory.mktemp("fully-sharded")
        return printed(4, "torch_fully_sharded.py", folder, warm="torch")

    return run


@pytest.mark.parametrize(
    "plan", ["two", "four", "recompute", "hybrid", "gradients", "gradients-hybrid", "nodes", "offload"]
)
def test_numbers_are_those_of_one_process(results, plan):
    """Parameters, averages and slots after 6 updates, with accumulation, clipping and weight decay by group."""
    found = results()["plans"][plan]
    assert found["ids"]
    assert found["difference"] <= 1e-12


def test_a_run_goes_on_at_any_other_plan(results):
    """Sharded parameters on 2 ranks, whole on 4, optimizer on 2, cut and sharded on 4, gradients on 2, one process."""
    found = results()["plans"]["chain"]
    assert found["ids"]
    assert found["difference"] <= 1e-12


def test_checkpoints_hold_whole_tensors(results):
    found = results()["plans"]
    assert found["problems"] == []
    assert found["shapes"]["same"]
    assert found["saved"] <= 1e-12, "by one copy of the model"
    assert found["shapes"]["number"] > 80


@pytest.mark.parametrize("plan", ["two", "four", "gradients", "optimizer", "named", "chain"])
def test_a_keras_model_trains_as_on_one_process(results, plan):
    """With masks, losses of weights, regularizers, a layer that is called twice, and a frozen one."""
    found = results()["keras_blocks"][plan]
    assert found["ids"]
    assert found["difference"] <= 1e-12


OPENED = {
    "tensor": "tensor",
    "tensor-data": "tensor",
    "classes": "tensor",
    "pipeline": "pipeline",
    "pipeline-data": "pipeline",
    "four-stages": "pipeline",
    "tensor-pipeline": "tensor pipeline",
}
"""Process groups that each plan opens."""


@pytest.mark.parametrize("plan", OPENED)
def test_layers_and_stages_exchange_by_groups_of_torch_as_on_gpus(results, plan):
    """Parameters, averages and slots after 6 updates, with clipping, and with uneven or few micro-batches."""
    found = results()["exchanges"][plan]
    assert found["opened"] == OPENED[plan].split()
    assert found["ids"]
    assert found["difference"] <= 1e-12


@pytest.mark.parametrize(
    ("wait", "what"),
    [
        ("sum", "add up something"),
        ("gather", "gather something"),
        ("receive", "send something"),
        ("send", "take something"),
        ("ended", "add up something"),
    ],
)
def test_waits_for_ranks_that_are_lost_end_with_a_sentence(results, wait, what):
    said = results()["lost"][wait]
    assert re.match(rf"rank 0 of 2 waited \d+ s for the other ranks to {what}: .", said)


@pytest.mark.parametrize("case", ["mean", "weighted", "adagrad", "gradients"])
def test_sizes_that_divide_by_nothing_and_ranks_without_samples(results, case):
    found = results()["uneven"][case]
    assert found["difference"] <= 1e-12
    for largest, together, whole in zip(found["largest"], found["together"], found["whole"], strict=True):
        assert together == whole or (whole == 1 and largest == 1)  # every rank holds scalars
        assert largest <= max(1, whole / 2)  # 5 rows are split into 2, 2, 1 and 0


@pytest.mark.parametrize("plan", ["parameters", "gradients"])
def test_layers_that_are_frozen_at_times_and_updates_that_are_left_out(results, plan):
    assert results()["frozen"][plan] < 1e-5
    for before, spoiled, after in results()["frozen"][f"{plan} overflow"]:
        assert before == spoiled != after


def test_layers_of_torch_that_use_their_weights_in_other_ways(results):
    assert results()["layers"]["difference"] <= 1e-12


def test_a_loss_that_holds_gradients_is_refused(results):
    for said in results()["layers"]["said"]:
        assert said.startswith("the task's loss has no gradient while parallel.shard gathers layers: ")


def test_ranks_that_compute_different_layers_end_with_their_names(results):
    for said in results()["apart"]["said"]:
        assert said["order"].endswith("one has reached layers.0, another layers.1")
        assert said["number"].endswith("one has reached layers.1, another the end of a forward pass")


def test_ranks_compare_layers_in_the_first_updates_only(results):
    assert results()["apart"]["hooks"] == [4, 0], "two layers, the model, and the end of its forward pass"


def test_hosts_that_run_ahead_compare_layers_at_the_end_of_a_pass(results):
    for said in results()["apart"]["at the end"]:
        assert said.endswith("one has reached the end of a forward pass, another layers.1")


def test_no_more_than_two_layers_and_the_root_are_copied_to_16_bits(results):
    """At the end of a forward pass, besides activations of a few samples; and the model trains as a replicated one."""
    found = results()["halves"]
    most = 2 * found["layer"] + found["root"] + found["activations"]
    assert all(0 < live <= most for live in found["sharded"]["live"])
    assert all(live > 5 * found["layer"] for live in found["whole"]["live"]), "a copy of each layer, or nothing is seen"
    np.testing.assert_allclose(found["sharded"]["losses"], found["whole"]["losses"], rtol=0.02)


def test_parameters_that_get_other_memory_are_refused(results):
    for said in results()["apart"]["said"]:
        assert said["memory"].startswith(
            "the task has given layers.0.weight other memory (.data = ...), which has no effect"
        )


def test_process_groups_meet_over_mpi(results):
    found = results()["groups"]
    assert not found["is_open"]
    of_all = [6.0, 10.0, 14.0]
    assert found["sums"] == [[of_all, [2.0, 4.0, 6.0] if rank % 2 == 0 else [4.0, 6.0, 8.0]] for rank in range(4)]


def test_runs_evaluate_and_predict_as_others_do(results):
    """20 samples on 4 ranks, so that ranks have different numbers of evaluation batches."""
    found = results()["runs"]
    assert found["run"]["reducer"] == "gloo-sharded"
    np.testing.assert_allclose(found["run"]["losses"], found["whole"]["losses"], rtol=0, atol=1e-12)
    assert found["run"]["predicted"] <= 1e-12
    assert found["run"]["metrics"]["loss"] == pytest.approx(found["whole"]["metrics"]["loss"], abs=1e-12)


def test_initial_weights_are_cut_as_they_are_read(results):
    found = results()["runs"]
    np.testing.assert_allclose(found["initial"]["losses"], found["initial-whole"]["losses"], rtol=0, atol=1e-12)
    assert found["initial"]["losses"][0] < found["run"]["losses"][2]


def test_initial_weights_may_be_chunks_that_ranks_of_torch_saved(results):
    found = results()["runs"]
    assert found["of-torch"]["losses"] == found["initial"]["losses"]
    np.testing.assert_allclose(found["of-torch-whole"]["losses"], found["initial"]["losses"], rtol=0, atol=1e-12)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_stays_near(results, precision):
    found = results()["runs"]
    np.testing.assert_allclose(found[precision]["losses"], found["whole"]["losses"][:2], rtol=0.02)


@pytest.mark.parametrize("plan", ["cut", "hybrid"])
def test_cut_layers_that_compute_again_train_to_the_same_bits(results, plan):
    """With dropout, for whole parameters and for parameters sharded by rows."""
    found = results()["runs"]
    assert found[f"{plan}, again"] == found[f"{plan}, kept"]
    assert found[f"{plan}, kept"]["losses"] != found["run"]["losses"], "something was dropped"


def test_what_cannot_be_sharded_is_refused(results):
    found = results()["runs"]
    assert "Adafactor does not update the rows of words.weight by themselves" in found["adafactor"]["error"]
    assert "call the model and its layers, not methods" in found["by layers"]["error"]
    assert "the task has opened torch.distributed, which" in found["opened"]["error"]
