"""The judge on ranks that share out a model: peers are those that have the same of it."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.straggler import traces
from hpctrain.monitor.chief import sentence
from hpctrain.monitor.chief.finding import Finding, FindingState, Kind
from hpctrain.monitor.chief.judge import Judge
from hpctrain.monitor.chief.peers import Load, heaviest
from hpctrain.run.grid import Grid
from hpctrain.train.clock import Phase

ACCUSING = (Kind.RANK, Kind.HOST, Kind.PAUSES, Kind.MANY, Kind.UNEVEN)
GRIDS = (
    *(Grid(16, tensor=2), Grid(16, pipeline=2), Grid(16, tensor=2, pipeline=2)),
    *(Grid(4, tensor=2), Grid(4, tensor=4), Grid(2, pipeline=2), Grid(8, tensor=2, pipeline=4)),
)


def confirmed(trace: traces.Trace, grid: Grid | None) -> list[Finding]:
    judge = Judge([f"n{rank}" for rank in range(trace.ranks)], grid=grid)
    found = [verdict for window in trace.windows() for verdict in judge.judge(window)]
    return [verdict for verdict in found if verdict.state is FindingState.CONFIRMED]


def accused(found: list[Finding]) -> set[int]:
    return {rank for verdict in found if verdict.kind in ACCUSING for rank in verdict.ranks}


def loaded(grid: Grid, seed: int = 1, tensor: int | None = None, stage: int | None = None) -> traces.Trace:
    """A healthy run in which the ranks of a part or a stage have 60% more to do, always."""
    trace = traces.simulated(grid.ranks, 640, np.random.default_rng(seed))
    for rank in range(grid.ranks):
        place = grid.place(rank)
        if place.tensor == tensor or place.stage == stage:
            trace = traces.slowed_processor(trace, rank, 0.6, 0)
    return trace


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_healthy_ranks_of_any_grid_are_left_alone(grid):
    for seed in range(5):
        found = confirmed(traces.simulated(grid.ranks, 640, np.random.default_rng(seed)), grid)
        assert {verdict.kind for verdict in found} <= {Kind.ROTATING}, "one step in a hundred takes twice as long"


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_a_slow_rank_is_found_among_those_that_have_the_same_of_the_model(grid):
    """Also where one part or stage has 60% more to do, of which the slow rank has none."""
    victim = grid.ranks - 2 if grid.tensor > 1 else 0
    place = grid.place(victim)
    heavy = {"tensor": 1 - place.tensor} if grid.tensor == 2 else {"stage": grid.pipeline - 1 - place.stage}
    for trace in (loaded(grid), loaded(grid, **heavy) if grid.tensor < 4 else loaded(grid)):
        found = confirmed(traces.slowed(trace, victim, Phase.FORWARD, 0.8, 300), grid)
        assert accused(found) == {victim}
        assert {verdict.cause for verdict in found if verdict.kind is Kind.RANK} == {"forward"}


@pytest.mark.parametrize(
    ("grid", "axis", "ranks"),
    [
        (Grid(16, tensor=2), "tensor", tuple(range(1, 16, 2))),
        (Grid(16, pipeline=2), "stage", tuple(range(8, 16))),
        (Grid(16, tensor=2, pipeline=2), "tensor", tuple(range(1, 16, 2))),
        (Grid(4, tensor=2), "tensor", (1, 3)),
        (Grid(4, tensor=4), "tensor", (1,)),
        (Grid(2, pipeline=2), "stage", (1,)),
    ],
)
def test_what_every_rank_of_a_part_or_stage_takes_longer_for_is_the_plans(grid, axis, ranks):
    found = confirmed(loaded(grid, **{axis: 1}), grid)
    assert accused(found) == set()
    [verdict] = [verdict for verdict in found if verdict.kind is Kind.PLAN]
    assert verdict.ranks == ranks
    assert verdict.slowdown == pytest.approx(0.6, abs=0.1)
    assert 0.12 < verdict.cost < 0.6
    said = sentence.of_verdict(verdict)
    assert said.startswith(f"{axis} 1 (rank")
    assert said.endswith("the layers are split unevenly, no rank is slow")


def test_a_plan_that_nobody_told_of_would_blame_ranks():
    """The test of the tests: without the grid, a heavy part is too many slow ranks."""
    assert accused(confirmed(loaded(Grid(16, tensor=2), tensor=1), None)) == set(range(1, 16, 2))


def test_one_fast_rank_of_two_peers_accuses_nobody():
    trace = traces.slowed_processor(traces.simulated(4, 640, np.random.default_rng(3)), 3, -0.3, 300)
    assert accused(confirmed(trace, Grid(4, tensor=2))) == set()


def test_the_axis_that_costs_more_is_told():
    grid = Grid(8, tensor=2, pipeline=2)
    levels = {0: 1.0, 1: 1.1, 2: 1.5, 3: 1.6}
    found = heaviest(levels, grid, 2.0)
    assert found == Load("stage", 1, pytest.approx(1.55 / 1.05 - 1), pytest.approx(0.125))
    assert heaviest({0: 1.0, 1: 1.0}, Grid(4, tensor=2, pipeline=2), 2.0) is not None, "a whole axis is there"
    assert heaviest({0: 1.0}, Grid(4, tensor=2), 2.0) is None
