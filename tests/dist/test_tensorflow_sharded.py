"""Sharded optimizer state of Keras models on real MPI ranks: same numbers as one process, part of the state on each."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.mpi import mpirun
from tests.tasks.tensorflow_sharded import BY_ROWS, WHOLE

PROGRAM = Path(__file__).parent / "programs" / "tensorflow_sharded.py"
ROOT = Path(__file__).parents[2]
SCENARIOS = {2: ("optimizers", "curves", "overflow", "refused"), 4: ("many", "resumed")}
HALVES = {"clipped and weighted": 0.5, "compiled": 0.8, "fp16": 0.8, "tables": 0.99, "Muon": 0.9}
"""Fraction of its initial value that the loss must fall to, by scenario."""

pytestmark = pytest.mark.world_size(4)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`results(ranks)`: results of all or the named scenarios on this number of ranks, run once."""

    @functools.cache
    def run(ranks: int, *named: str) -> Any:
        folder = tmp_path_factory.mktemp("sharded")
        env = {"PYTHONPATH": str(ROOT)}
        result = mpirun(ranks, PROGRAM, folder, *(named or SCENARIOS[ranks]), env=env, timeout=240, warm="tensorflow")
        return json.loads(result.stdout.strip().splitlines()[-1])

    return run


def require_exact(found: Any) -> None:
    """Check that losses, weights, averages and slots match one process up to rounding in float64."""
    for rank in found["ranks"]:
        assert rank["numbers"] <= 1e-12 and rank["slots"] <= 1e-12
    assert sum(rank["elements"] for rank in found["ranks"]) == found["ranks"][0]["of all"], "each is on one rank"


@pytest.mark.parametrize("name", BY_ROWS)
def test_optimizers_that_go_by_elements_are_cut_by_rows(results: Any, name: str) -> None:
    found = results(2)["optimizers"][name]
    require_exact(found)
    slots = found["ranks"][0]["of all"]
    row = 31 * 3  # of the largest weight, of up to three slots
    assert all(abs(rank["elements"] - slots / 2) <= row for rank in found["ranks"])
    assert slots == 0 or any(rank["cut"] for rank in found["ranks"])


@pytest.mark.parametrize("name", WHOLE)
def test_optimizers_that_look_at_tensors_keep_them_whole(results: Any, name: str) -> None:
    found = results(2)["optimizers"][name]
    require_exact(found)
    assert not any(rank["cut"] for rank in found["ranks"])


@pytest.mark.tour
def test_a_framework_trains_as_one_process_does_by_messages(results: Any) -> None:
    found = results(2, "messages")["messages"]
    assert found["reducer"] == "mpi-sharded"
    require_exact(found)
    assert any(rank["cut"] for rank in found["ranks"])


def test_a_rank_that_updates_nothing_goes_along(results: Any) -> None:
    found = results(4)["many"]
    require_exact(found)
    assert min(rank["elements"] for rank in found["ranks"]) == 0


@pytest.mark.parametrize("name", HALVES)
def test_curves_are_those_of_a_replicated_run(results: Any, name: str) -> None:
    """After 14 updates; after 50 with clipping and moving averages, also those of one process."""
    found = results(2)["curves"][name]
    print(f"{name}: losses {found[0]['losses']:.1e}, weights {found[0]['numbers']:.1e}")
    assert len({rank["hash"] for rank in found}) == 1
    for rank in found:
        assert rank["losses"] <= 1e-6 and rank["numbers"] <= 1e-6
        assert rank["falls"] < HALVES[name]


def test_what_is_not_finite_leaves_the_update_out_or_ends_the_run_on_all_ranks(results: Any) -> None:
    found = results(2)["overflow"]["ranks"]
    for rank in found:
        before, spoiled, after = rank["hashes"]
        assert before == spoiled != after
        assert rank["ranks"] == [1] and rank["unchanged"]
    assert found[0]["hashes"] == found[1]["hashes"]


def test_optimizers_that_cannot_be_sharded_are_refused_on_all_ranks(results: Any) -> None:
    for said in results(2)["refused"]["said"]:
        assert said["coupled"].startswith("parallel.shard is optimizer, and Coupled updates a parameter from others")
        assert said["hiding"].startswith("parallel.shard is optimizer, and Hiding holds other optimizers, or state")
        assert said["clipping"].startswith("parallel.shard is optimizer, and Adam has global_clipnorm")


def test_any_state_resumes_on_any_ranks_sharded_or_not(results: Any) -> None:
    found = results(4)["resumed"]
    assert len(found) == 5
    for resumed in found.values():
        assert resumed["ids"] and resumed["names"]
        assert resumed["difference"] <= 1e-12
    assert found["optimizer-4-optimizer"]["same"], "bit for bit, as if nothing had happened"
