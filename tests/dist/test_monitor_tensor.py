"""The monitor with tensor and pipeline plans: a rank that waits for its neighbours is not the slow one."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpctrain.report.explain import explain
from hpctrain.run.events import RunStarted
from hpctrain.run.run_view import RunView
from tests.support.mpi import mpirun

PROGRAM = Path(__file__).parent / "programs" / "tensor_monitor.py"
ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.world_size(4), pytest.mark.alone]
Folder = Callable[[], Path]
Events = Callable[[str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Folder of all runs, which are launched together, once."""

    @functools.cache
    def launched() -> Path:
        made = tmp_path_factory.mktemp("monitored")
        mpirun(4, PROGRAM, made, timeout=200, warm="torch", check=False)
        return made

    return launched


@pytest.fixture
def events(folder: Folder) -> Events:
    """The monitor's events of a run by its name."""

    def lines(run: str) -> list[str]:
        return (folder() / run / "monitor" / "events.jsonl").read_text().splitlines()

    return lambda run: [json.loads(line) for line in lines(run)]


def test_the_slow_rank_is_named_and_not_the_one_that_waits_for_it(events):
    found = [event for event in events("rank") if event.get("state") == "confirmed" and event["kind"] == "rank"]
    assert {event["rank"] for event in found} == {3}
    assert found[0]["cause"] == "forward" and found[0]["slowdown"] > 0.5
    assert found[0]["sentence"].startswith("rank 3 (data 1, tensor 1) on ")


def test_a_hung_rank_is_named_with_its_place_and_who_waits_next_to_it(events):
    [hang] = [event for event in events("rank") if event["event"] == "hang"]
    assert [rank["rank"] for rank in hang["ranks"]] == [3]
    assert "rank 3 (data 1, tensor 1) on " in hang["sentence"]
    assert "; 3 ranks wait (rank 2 in the middle of a pass)" in hang["sentence"]


def test_a_part_of_the_layers_that_has_more_to_do_is_the_plans(events):
    confirmed = [event for event in events("plan") if event.get("state") == "confirmed"]
    assert not {event["kind"] for event in confirmed} & {"rank", "host"}
    [plan] = [event for event in confirmed if event["kind"] == "plan"]
    assert (plan["ranks"], plan["cause"]) == ([1, 3], "forward")
    assert plan["sentence"].startswith("tensor 1 (ranks 1, 3) takes ")
    assert "the layers are split unevenly, no rank is slow" in plan["sentence"]


def test_a_stage_that_takes_longer_is_told(events):
    confirmed = [event for event in events("stage") if event.get("state") == "confirmed"]
    assert not {event["kind"] for event in confirmed} & {"rank", "host"}
    [plan] = [event for event in confirmed if event["kind"] == "plan"]
    assert plan["ranks"] == [2, 3] and plan["evidence"] == []
    assert plan["sentence"].startswith("stage 1 (ranks 2-3) takes ")
    assert "no rank is slow" in plan["sentence"]


def test_a_rank_that_fails_is_named_with_its_place(folder):
    view = RunView(folder() / "error")
    newest = view.snapshot().newest
    assert newest is not None and newest.verdict is not None
    assert newest.verdict.reason.startswith("rank 3 (data 1, tensor 1) on ")
    assert newest.verdict.reason.endswith(": this rank cannot go on")
    assert explain(view.history()).evidence == (newest.verdict.reason,)


def test_operations_of_a_ranks_part_are_counted(folder):
    """Two blocks of a 4 x 8 and an 8 x 4 matrix: forward, plus twice as much backward."""
    data = RunView(folder() / "rank").history()
    started = data.last(RunStarted)
    assert started is not None and started.peak_flops_per_s is not None
    assert started.flops_per_sample == 3 * 2 * (2 * 4 * 8 + 2 * 8 * 4)
    rates, used = data.train["samples_per_s"].value, data.train["mfu"].value
    assert len(used) == 3
    # Two groups of ranks with different samples.
    assert used == pytest.approx(rates / 2 * started.flops_per_sample / started.peak_flops_per_s, rel=1e-9)
    assert (used > 0).all()
