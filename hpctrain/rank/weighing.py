"""Weighs a run's model as a rank of some plan would have it: trains it for one step, in this process alone."""

from __future__ import annotations

import dataclasses
import math
import socket
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
from numpy.typing import NDArray

from hpctrain.comm.group import TIMEOUT_S, Group
from hpctrain.comm.world import World, alone
from hpctrain.config.combinations import Feature, refuse, used
from hpctrain.config.sections import Config
from hpctrain.errors import UserError
from hpctrain.parallel.plan import Weighed
from hpctrain.rank import wiring
from hpctrain.rank.problem import Problem, first_batch, make_problem
from hpctrain.tasks.definition import TorchTask
from hpctrain.train.clock import IntervalClock
from hpctrain.train.state import Placement, StateTensor

if TYPE_CHECKING:
    from hpctrain.frameworks.torch.framework import TorchFramework

MOST_SAMPLES = 8
"""Of the batch: what passes keep grows with it in proportion."""


class Imagined(Group):
    """A group of which this process is the first rank, and the others are as it is."""

    def __init__(self, name: str, size: int) -> None:
        super().__init__(name)
        self.size = size

    def allgather(self, value: Any, what: str, timeout_s: float = TIMEOUT_S) -> list[Any]:
        return [value] * self.size

    def gather(self, values: NDArray[Any], what: str, timeout_s: float = TIMEOUT_S) -> NDArray[Any]:
        return np.stack([values] * self.size)

    def add(self, values: NDArray[Any], what: str, timeout_s: float = TIMEOUT_S) -> None:
        values *= self.size


def program_bytes() -> int:
    """Of this process's memory, with PyTorch and before there is a model."""
    import hpctrain.frameworks.torch.framework  # noqa: F401  what it needs is the program's, not the model's

    return int(psutil.Process().memory_info().rss)


@dataclass(frozen=True)
class Model:
    """A run's model in this process, and what goes into it."""

    problem: Problem
    framework: TorchFramework
    world: World


@contextmanager
def made(config: Config, tensor: int) -> Iterator[Model]:
    """As the first rank of a tensor group has it, with whole optimizers. Raises UserError."""
    from hpctrain.frameworks.torch.framework import TorchFramework

    config = dataclasses.replace(
        config,
        parallel=dataclasses.replace(config.parallel, tensor=tensor, shard="none"),
        reduce=dataclasses.replace(config.reduce, kind="none", compression="none"),
    )
    problem = make_problem(config, alone())
    if not isinstance(problem.task, TorchTask):
        what = f"{config.task} is a KerasTask, of which each rank has all"
        raise UserError(what, "ask for the plans of a TorchTask")
    me = alone()
    world = World(me.everyone, me.data, me.local, 0, 1, socket.gethostname(), Imagined("tensor", tensor))
    with closing(wiring.make_framework(config, world, problem.task, IntervalClock())) as framework:
        assert isinstance(framework, TorchFramework), "of a TorchTask"
        yield Model(problem, framework, world)


def share_of(config: Config, ranks: int) -> float:
    """Of what ranks update, what the one with most has with ``parallel.shard: optimizer``.

    Args:
        config: of the run, whose task is made anew.
        ranks: of the run, more than one.

    Raises:
        UserError: the run's optimizers cannot be sharded; says why.
    """
    from hpctrain.frameworks.torch.checks import model_features
    from hpctrain.frameworks.torch.sharding import judge, largest_share, unsuited
    from hpctrain.frameworks.torch.shares import shares_of

    sharded = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, tensor=1, shard="optimizer"))
    with made(config, 1) as model:
        task, framework = model.framework.task, model.framework
    parts = framework.optimizer_state.every  # it is closed: what guards an own step's optimizers is gone
    unfit = unsuited(parts, framework.holdings)
    features = sharded.features() | model_features(framework.model, parts, False, ranks, unfit)
    refuse(features)
    judgement = judge(parts, framework.device)
    refuse(features | used({Feature.COUPLED: judgement.coupled}))
    return largest_share(shares_of(task, framework.model, parts), judgement, Imagined("data", ranks))


def weigh(config: Config, tensor: int, ranks: int) -> Weighed:
    """What the first rank of a tensor group has of a run's model.

    Args:
        config: of the run, whose task is made anew.
        tensor: size of the group.
        ranks: of the run.

    Raises:
        UserError: the model cannot be cut so, or not be trained; says which layer.
    """
    from hpctrain.frameworks.torch.activations import Kept

    with made(config, tensor) as model:
        framework = model.framework
        batch = first_batch(model.problem, config, model.world, MOST_SAMPLES)
        samples = len(next(iter(batch.values())))
        kept = Kept(one for group in (framework.model.parameters(), framework.model.buffers()) for one in group)
        with kept.weighing():
            framework.step([batch], samples)
        return of_state(framework.state(), kept.num_bytes / samples, ranks)


def of_state(state: Iterable[StateTensor], activations: float, ranks: int) -> Weighed:
    """Adds up a framework's state by what it is."""
    held = dict.fromkeys(("model", "optimizer", "ema"), 0)
    whole: dict[str, int] = {}
    gradients = 0
    for tensor in state:
        own = num_bytes(tensor, tensor.shape)
        kind = tensor.name.partition("/")[0]
        held[kind] = held.get(kind, 0) + own
        if kind == "model" and tensor.is_trained:
            gradients += max(own, 4 * math.prod(tensor.shape))
        saved = num_bytes(tensor, tensor.cut.shape) if tensor.cut else own
        whole[tensor.name] = saved * (ranks if tensor.placement is Placement.RANK else 1)
    return Weighed(held["model"], gradients, held["optimizer"], held["ema"], activations, sum(whole.values()))


def num_bytes(tensor: StateTensor, shape: tuple[int, ...]) -> int:
    """Of a tensor's dtype in some shape."""
    return math.prod(shape) * (2 if tensor.dtype == "bfloat16" else np.dtype(tensor.dtype).itemsize)
