"""Builds the plan of some ranks of a run in one process, without the others (``hpctrain plan --check``).

Each of these ranks makes its task, finds its groups and applies the strategies of a run, as it would on the cluster;
``comm.imagined`` answers for the others. Nothing is trained. Parameters on the meta device stay there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from hpctrain.backends.torch.strategies.memory_estimate import MemoryEstimate
from hpctrain.comm.imagined import Calls, Imagined, ImaginedWorld, imagine
from hpctrain.comm.world import World, in_grid
from hpctrain.config.sections import Config
from hpctrain.errors import UserError, foreign_errors
from hpctrain.rank.problem import make_problem, require_same_data
from hpctrain.rank.trial import in_short, node_size
from hpctrain.reduce.reducer_choice import R, ReducerChoice, ReducerFactory
from hpctrain.run.grid import Grid
from hpctrain.tasks.definition import TorchTask
from hpctrain.train.clock import IntervalClock
from hpctrain.train.framework import StepSettings
from hpctrain.train.schedule import global_batch

if TYPE_CHECKING:
    from hpctrain.backends.torch.torch_framework import TorchFramework


@dataclasses.dataclass(frozen=True)
class RankPlan:
    """What a rank of a run would have."""

    rank: int
    place: str
    """Its place in the grid of ranks, as ``Grid.label`` gives it."""
    node: int
    samples: int
    """Largest number of samples of its part of a global batch."""
    memory: MemoryEstimate
    """Without activations."""
    calls: Calls
    """The collectives with which it builds its plan, in order."""

    @property
    def total(self) -> int:
        """Bytes of the state, gradients, and what is gathered at a time."""
        return sum(self.memory.parts.values())

    def to_json(self) -> dict[str, Any]:
        """What may interest a program, JSON-able."""
        place = {"rank": self.rank, "node": self.node, "samples": self.samples}
        return {**place, **self.memory.parts, "total": self.total}


def ranks_to_check(ranks: int, per_node: int, pipeline: int = 1) -> list[int]:
    """Returns the first and the last rank of the first and of the last node, and the first of each pipeline stage."""
    first_of_last = (ranks - 1) // per_node * per_node
    stages = range(0, ranks, max(ranks // pipeline, 1))
    return sorted({0, min(per_node, ranks) - 1, first_of_last, ranks - 1, *stages})


def check(config: Config, ranks: int) -> list[RankPlan]:
    """Builds the plans of some ranks. Raises UserError if one of them cannot be built, or two do not fit together."""
    if config.sync.kind == "local":
        raise UserError("--check knows no ranks that train apart (sync.kind: local)", "leave --check out")
    per_node = node_size(config, ranks)
    found: list[RankPlan] = []
    for rank in ranks_to_check(ranks, per_node, config.parallel.pipeline):
        found.append(plan_of(config, imagine(rank, ranks, per_node, found[0].calls if found else None)))
        require_same_calls(found[0], found[-1])
    return found


def plan_of(config: Config, world: ImaginedWorld) -> RankPlan:
    """Builds a rank's plan. Raises UserError, which names the rank if it is not the first."""

    def explained(error: Exception) -> UserError:
        short = in_short(error)
        return UserError(f"rank {world.rank}: {short.what}", short.fix) if world.rank else short

    assert isinstance(world.everyone, Imagined), "made by imagine"
    parallel = config.parallel
    with foreign_errors(explained):
        from hpctrain.backends.torch.strategies.built import weighed

        arranged = in_grid(world, parallel.tensor, parallel.pipeline)
        groups = arranged.data.size
        samples = -(-global_batch(config.train, groups, world.size // groups) // groups)
        with opened(config, arranged) as framework:
            memory = weighed(framework, config.train.accumulate)
        grid = Grid(world.size, parallel.tensor, parallel.pipeline)
        return RankPlan(world.rank, grid.label(world.rank), world.node, samples, memory, world.everyone.calls)


class Unchosen(ReducerChoice):
    """Opens no reducer: nothing is summed."""

    def known(self, factory: ReducerFactory[R]) -> R | None:
        """See ReducerChoice."""
        return None


@contextmanager
def opened(config: Config, world: World) -> Iterator[TorchFramework]:
    """Opens a rank's framework, which can exchange nothing."""
    from hpctrain.backends.torch.strategies.built import closing_default_group
    from hpctrain.backends.torch.task.opening import open_torch

    problem = make_problem(config, world)
    require_same_data(problem, world)
    if not isinstance(problem.task, TorchTask):
        raise UserError(f"{config.task} is a KerasTask, whose model every rank holds whole", "leave --check out")
    reduce = dataclasses.replace(config.reduce, kind="mpi")  # for which strategies open no process group
    settings = StepSettings(config.train, config.parallel, reduce, config.seed, config.features())
    with closing_default_group():
        choice = Unchosen(reduce, world)
        framework = open_torch(problem.task, world, settings, IntervalClock(), choice, allocates=False)
        with closing(framework):
            yield framework


def require_same_calls(first: RankPlan, other: RankPlan) -> None:
    """Raises UserError if two ranks of a group do not call its collectives in the same order, on equal shapes."""
    for members in first.calls.made:
        mine, theirs = first.calls.of(members), other.calls.of(members)
        odd = next((pair for pair in zip_longest(mine, theirs) if pair[0] != pair[1]), None)
        if odd and theirs:  # the other rank is in this group
            says = [f"{one.what} {one.array}".strip() if one else "be done" for one in odd]
            raise UserError(
                f"rank {first.rank} would {says[0]}, while rank {other.rank} would {says[1]}",
                "make the task function, its model and its data independent of the rank",
            )
