"""Sharded optimizer state on real MPI ranks: same numbers as one process, part of the state on each rank."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from tests.support.mpi import printed
from tests.tasks.torch_sharded import BY_ROWS, SOME, WHOLE

RANKS = pytest.mark.parametrize("ranks", [2, 4])
PRECISIONS = ("fp32", "bf16", "fp16", "channels", "halves")
SCENARIOS = {
    2: ("optimizers", "exchanges", "bits", "overflow", "own_steps", "replaced", "grown", "frozen", "unknown"),
    4: ("optimizers", "exchanges", "messages", "resumed"),
}
BY_GROUP = {2: ("optimizers", "bits", "overflow", "own_steps", "replaced", "frozen"), 4: ("optimizers", "uneven")}
"""Scenarios of sharded optimizers that exchange by a process group."""
GROUP = "optimizer:nccl"

pytestmark = pytest.mark.world_size(4)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`results(ranks, shard)`: results of all scenarios, run once."""

    @functools.cache
    def run(ranks: int, shard: str = "optimizer") -> Any:
        folder = tmp_path_factory.mktemp("sharded")
        scenarios = {GROUP: BY_GROUP}.get(shard, SCENARIOS)[ranks]
        return printed(ranks, "torch_sharded.py", folder, shard, *scenarios, warm="torch")

    return run


def tried(names: Iterable[str]) -> list[tuple[int, str]]:
    """Optimizers to try: all on four ranks, some on two."""
    return [*((4, name) for name in names), *((2, name) for name in names if name in SOME)]


def require_exact(found: Any) -> None:
    """Check that parameters, averages and slots match one process up to rounding in float64."""
    for rank in found["ranks"]:
        assert rank["numbers"] <= 1e-12 and rank["slots"] <= 1e-12


def require_shares(found: Any) -> None:
    """Check that each slot element is on one rank, and that each rank has its share up to half a row at either end."""
    ranks = found["ranks"]
    assert sum(rank["bytes"] for rank in ranks) == found["bytes"]
    for rank in ranks:
        assert abs(rank["elements"] - found["elements"] / len(ranks)) <= max(each["row"] for each in ranks)
    assert any(rank["cut"] for rank in ranks)


@pytest.mark.parametrize("shard", ["optimizer", GROUP])
@pytest.mark.parametrize(("ranks", "name"), tried(BY_ROWS))
def test_optimizers_that_go_by_elements_are_cut_by_rows(results, ranks, name, shard):
    found = results(ranks, shard)["optimizers"][name]
    require_exact(found)
    require_shares(found)


@pytest.mark.parametrize(("ranks", "name"), tried(WHOLE))
def test_optimizers_that_look_at_tensors_keep_them_whole(results, ranks, name):
    found = results(ranks)["optimizers"][name]
    require_exact(found)
    assert sum(rank["bytes"] for rank in found["ranks"]) == found["bytes"]
    if name != "Muon":  # AdamW handles its vectors
        assert not any(rank["cut"] for rank in found["ranks"])


def test_ranks_that_share_no_memory_send_messages(results):
    found = results(4)["messages"]
    require_exact(found)
    require_shares(found)


@pytest.mark.parametrize(("name", "kind"), [("node", "ShmSharded"), ("mpi", "MpiSharded"), ("large", "MpiSharded")])
@RANKS
def test_sums_and_parameters_arrive(results, ranks, name, kind):
    found = results(ranks)["exchanges"][name]
    assert found["kind"] == kind
    assert all(all(rank) for rank in found["right"])


@pytest.mark.parametrize("shard", ["optimizer", GROUP])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_on_one_node_the_bits_are_those_of_a_replicated_run(results, precision, shard):
    hashes = results(2, shard)["bits"][precision]
    assert len({one for rank in hashes for one in rank}) == 1


@pytest.mark.parametrize("shard", ["optimizer", GROUP])
def test_an_overflow_leaves_the_update_out_on_all_ranks(results, shard):
    hashes = results(2, shard)["overflow"]["hashes"]
    for before, spoiled, after in hashes:
        assert before == spoiled != after
    assert len(set(map(tuple, hashes))) == 1


@pytest.mark.parametrize("shard", ["optimizer", GROUP])
def test_several_optimizers_of_an_own_step_are_sharded_apart(results, shard):
    from tests.tasks import torch_own_steps as own  # takes seconds

    found = results(2, shard)["own_steps"]
    np.testing.assert_allclose(found["weights"], own.plain(own.plain_gan, own.gan, 8), rtol=1e-12, atol=1e-12)
    assert len(set(found["hashes"])) == 1


@pytest.mark.parametrize("shard", ["optimizer", GROUP])
def test_parameters_that_a_task_gives_other_memory_go_on_being_trained(results, shard):
    assert len({one for rank in results(2, shard)["replaced"]["hashes"] for one in rank}) == 1


def test_an_optimizer_that_gets_parameters_later_is_refused(results):
    for said in results(2)["grown"]["said"]:
        assert said.startswith("an optimizer was given parameters after the run had begun")


@pytest.mark.parametrize("shard", ["optimizer", GROUP])
def test_layers_that_are_frozen_at_times_train_as_in_one_process(results, shard):
    assert max(results(2, shard)["frozen"]["differences"]) < 1e-5


def test_an_unknown_optimizer_is_refused_on_all_ranks(results):
    said = results(2)["unknown"]["said"]
    assert all(each.startswith("parallel.shard is optimizer, and Coupled may update") for each in said)


def test_any_state_resumes_on_any_ranks_sharded_or_not(results):
    found = results(4)["resumed"]
    assert len(found) == 12
    for resumed in found.values():
        assert resumed["ids"] and resumed["names"]
        assert resumed["difference"] <= 1e-12


def test_a_rank_with_fewer_passes_adds_zeros_to_those_of_others(results):
    assert max(results(4, GROUP)["uneven"]["differences"]) <= 1e-12
