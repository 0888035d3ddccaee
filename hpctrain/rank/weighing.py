"""Weighs a run's model as a rank of some plan would have it: trains it for one step, in this process alone."""

from __future__ import annotations

import dataclasses
import math
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import psutil
from numpy.typing import NDArray

from hpctrain.comm.group import TIMEOUT_S, Group
from hpctrain.comm.world import World, alone
from hpctrain.config.combinations import Feature, refuse, used
from hpctrain.config.sections import Config
from hpctrain.errors import UserError
from hpctrain.parallel.plan import ByRows, Sums, Weighed
from hpctrain.rank import wiring
from hpctrain.rank.problem import Problem, first_batch, make_problem
from hpctrain.rank.trial import told_shortly
from hpctrain.tasks.definition import TorchTask
from hpctrain.train.clock import IntervalClock
from hpctrain.train.framework import HostBatch
from hpctrain.train.state import Placement, StateTensor

if TYPE_CHECKING:
    from hpctrain.frameworks.torch.framework import TorchFramework
    from hpctrain.frameworks.torch.sharding import Judgement
    from hpctrain.frameworks.torch.shares import Share

MOST_SAMPLES = 8
"""Of the batch: what passes keep grows with it in proportion."""


class Imagined(Group):
    """A group of which this process is the first rank, and the others are as it is. Keeps account of its sums."""

    def __init__(self, name: str, size: int) -> None:
        super().__init__(name)
        self.size = size
        self.sums = Sums()

    def allgather(self, value: Any, what: str, timeout_s: float = TIMEOUT_S) -> list[Any]:
        return [value] * self.size

    def gather(self, values: NDArray[Any], what: str, timeout_s: float = TIMEOUT_S) -> NDArray[Any]:
        self.sums = Sums(self.sums.count + 0.5, self.sums.bytes + 0.5 * self.size * values.nbytes)
        return np.stack([values] * self.size)

    def add(self, values: NDArray[Any], what: str, timeout_s: float = TIMEOUT_S) -> None:
        self.sums = Sums(self.sums.count + 1, self.sums.bytes + values.nbytes)
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
    tensor: Imagined
    """The world's tensor group."""


@contextmanager
def made(config: Config, tensor: int, pipeline: int = 1) -> Iterator[Model]:
    """As the first rank of a tensor group has it, with whole optimizers. Raises UserError, also for what the task's own
    code raises, here or in the body."""
    config = dataclasses.replace(
        config,
        parallel=dataclasses.replace(config.parallel, tensor=tensor, pipeline=pipeline, shard="none"),
        reduce=dataclasses.replace(config.reduce, kind="none", compression="none"),
    )
    with told_shortly():
        yield from _made(config, tensor)


def _made(config: Config, tensor: int) -> Iterator[Model]:
    from hpctrain.frameworks.torch.framework import TorchFramework

    problem = make_problem(config, alone())
    if not isinstance(problem.task, TorchTask):
        what = f"{config.task} is a KerasTask, of which each rank has all"
        raise UserError(what, "ask for the plans of a TorchTask")
    me = alone()
    group = Imagined("tensor", tensor)
    world = World(me.everyone, me.data, me.local, 0, 1, socket.gethostname(), group)
    with closing(wiring.make_framework(config, world, problem.task, IntervalClock())) as framework:
        assert isinstance(framework, TorchFramework), "of a TorchTask"
        yield Model(problem, framework, world, group)


def share_of(config: Config, tensor: int, data: int) -> float:
    """Of what ranks update, what the one with most has with ``parallel.shard: optimizer``.

    Args:
        config: of the run, whose task is made anew.
        tensor: size of a tensor group.
        data: how many groups there are, more than one.

    Raises:
        UserError: the run's optimizers cannot be sharded; says why.
    """
    from hpctrain.frameworks.torch.sharding import largest_share

    _, shares, judgement, _ = judged(config, tensor, data, "optimizer")
    return largest_share(shares, judgement, Imagined("data", data))


def rows_of(config: Config, tensor: int, data: int) -> ByRows:
    """What ``parallel.shard: parameters`` leaves a rank; see ``share_of``."""
    from hpctrain.frameworks.torch.sharding import uncuttable
    from hpctrain.parallel.sharded import part_of_rows
    from hpctrain.parallel.torch_fully_sharded import layers_of

    framework, shares, judgement, features = judged(config, tensor, data, "parameters")
    parts = framework.optimizer_state.every
    refuse(features | used({Feature.WHOLE_TENSORS: uncuttable(shares, parts, judgement, alone())}))
    every = list(framework.model.parameters())
    held = sum(part_of_rows(len(one), 0, data)[1] / len(one) * one.nbytes if one.ndim else one.nbytes for one in every)
    total = sum(one.nbytes for one in every)
    layers = sorted(sum(one.nbytes for one in layer.parameters()) for layer in layers_of(framework.model))
    return ByRows(held / max(total, 1), total - sum(layers[:-2]))


def judged(
    config: Config, tensor: int, data: int, shard: Literal["optimizer", "parameters", "tables"]
) -> tuple[TorchFramework, Mapping[str, Share], Judgement, dict[Feature, Any]]:
    """A model, the parameters of its optimizers, how these may be shared out, and all that the run uses."""
    from hpctrain.frameworks.torch.checks import model_features
    from hpctrain.frameworks.torch.metrics import of_torchmetrics
    from hpctrain.frameworks.torch.sharding import judge, unsuited
    from hpctrain.frameworks.torch.shares import shares_of

    stages = 1 if shard == "tables" else config.parallel.pipeline  # the others are told of them
    parallel = dataclasses.replace(config.parallel, tensor=tensor, shard=shard, pipeline=stages)
    as_sharded = dataclasses.replace(config, parallel=parallel)
    with made(config, tensor) as model:
        task, framework = model.framework.task, model.framework
    parts = framework.optimizer_state.every  # it is closed: what guards an own step's optimizers is gone
    unfit = unsuited(parts, framework.holdings)
    features = as_sharded.features() | model_features(framework.model, parts, False, data, unfit)
    features |= used({Feature.TORCH_METRICS: of_torchmetrics(task), Feature.OWN_STEP: task.step is not None})
    refuse(features)
    judgement = judge(parts, framework.device)
    refuse(features | used({Feature.COUPLED: judgement.coupled}))
    return framework, shares_of(task, framework.model, parts), judgement, features


def weigh(config: Config, tensor: int, ranks: int, pipelines: Sequence[int] = ()) -> Weighed:
    """What the first rank of a tensor group has of a run's model.

    Args:
        config: of the run, whose task is made anew.
        tensor: size of the group.
        ranks: of the run.
        pipelines: numbers of stages that are possible; a model with fewer layers is left out.

    Raises:
        UserError: the model cannot be cut so, or not be trained; says which layer.
    """
    from hpctrain.frameworks.torch.activations import Kept, Lookups
    from hpctrain.parallel.torch_tables import MESSAGES, MESSAGES_AT_ENDS, tables_of

    with made(config, tensor) as model:
        framework = model.framework
        batch = first_batch(model.problem, config, model.world, MOST_SAMPLES)
        samples, before = len(next(iter(batch.values()))), model.tensor.sums
        kept = Kept(one for group in (framework.model.parameters(), framework.model.buffers()) for one in group)
        marked: dict[str, Any] = {}
        if tensor == 1:
            with suppress(UserError):  # ``require_tables`` says why
                marked = {one.name: one.layer for one in tables_of(framework.model, framework.task.tensor)}
        lookups = Lookups(list(marked.values()))
        with kept.weighing(), lookups.counting():
            framework.step([batch], samples)
        after, state = model.tensor.sums, framework.state()
        whole = dataclasses.replace(
            of_state(state, kept.num_bytes / samples, ranks),
            exchanged=framework.gradient_bytes,
            sums=Sums(after.count - before.count, (after.bytes - before.bytes) / samples),
        )
        stages: dict[int, Weighed] = {}
        for pipeline in pipelines:
            with suppress(UserError):
                stages[pipeline] = largest_stage(framework, state, whole, pipeline, config.train.accumulate, batch)
        if marked:
            messages = MESSAGES * lookups.count + MESSAGES_AT_ENDS
            asked = Sums(messages, lookups.num_bytes / samples)
            shapes = {f"{name}.weight": tuple(layer.weight.shape) for name, layer in marked.items()}
            rows = with_rows(framework, state, whole, shapes, ranks)
            whole = dataclasses.replace(whole, tables=dataclasses.replace(rows, lookups=asked))
        return dataclasses.replace(whole, stages=stages)


def with_rows(
    framework: TorchFramework,
    state: Sequence[StateTensor],
    whole: Weighed,
    tables: Mapping[str, tuple[int, ...]],
    ranks: int,
) -> Weighed:
    """What ``parallel.shard: tables`` leaves the rank that has most rows.

    Args:
        framework: that has the model.
        state: of it, after an update.
        whole: what a rank has without.
        tables: shapes of those that are shared out, by name.
        ranks: among which.
    """
    from hpctrain.frameworks.torch.pipelined import parameter_of
    from hpctrain.parallel.sharded import part_of_rows

    def shape_of(tensor: StateTensor) -> tuple[int, ...]:
        is_table = tables.get(parameter_of(tensor.name)) == tensor.shape
        return (part_of_rows(tensor.shape[0], 0, ranks)[1], *tensor.shape[1:]) if is_table else tensor.shape

    sparse = {id(one) for reducers in framework.reducers.of.values() for one in reducers.sparse}
    held = {framework.names[id(one)]: one for one in framework.parameters if id(one) not in sparse}
    summed = sum(4 * held[name].numel() for name in tables if name in held)
    own = of_state(state, whole.activations, ranks, shape_of)
    return dataclasses.replace(own, checkpoint=whole.checkpoint, exchanged=whole.exchanged - summed, sums=whole.sums)


def require_tables(config: Config, data: int) -> None:
    """Raises UserError if a run's tables cannot be shared out by rows among so many ranks."""
    from hpctrain.frameworks.torch.sharding import plain
    from hpctrain.parallel.torch_probe import require_elementwise
    from hpctrain.parallel.torch_tables import tables_of

    framework, _, _, _ = judged(config, 1, data, "tables")
    for one in tables_of(framework.model, framework.task.tensor):
        for optimizer in plain(framework.optimizer_state.every):
            require_elementwise(optimizer, one.layer.get_parameter("weight"), f"{one.name}.weight", 0)


def require_stages(config: Config, pipeline: int) -> None:
    """Raises UserError if a run's model cannot be shared out among so many stages."""
    with made(config, 1, pipeline):
        pass


def largest_stage(
    framework: TorchFramework,
    state: Sequence[StateTensor],
    whole: Weighed,
    pipeline: int,
    micro_batches: int,
    batch: HostBatch,
) -> Weighed:
    """Of a pipeline's stages, the one with the largest state. The first stage keeps the activations of as many
    micro-batches as there are stages; layers are taken to keep equally much. Raises UserError."""
    from hpctrain.frameworks.torch.activations import handed_on
    from hpctrain.frameworks.torch.pipelined import parameter_of, stages_of

    stages = stages_of(framework.task, framework.model, pipeline)
    assert stages is not None, "there are several"
    activations = whole.activations * min(pipeline, micro_batches) / pipeline
    between = max(handed_on(framework, stages, batch)) / len(next(iter(batch.values())))
    found = []
    for stage in range(pipeline):
        held = frozenset[int]().union(*(layer.held for layer in stages.of(stage)))
        names = {framework.names[one] for one in held & framework.names.keys()}
        own = of_state([one for one in state if parameter_of(one.name) in names], activations, 1)
        exchanged = round(whole.exchanged * own.gradients / max(whole.gradients, 1))
        found.append(
            dataclasses.replace(
                own, checkpoint=whole.checkpoint, exchanged=exchanged, sums=whole.sums, handed_on=between
            )
        )
    return max(found, key=lambda one: one.parameters + one.gradients + one.optimizer + one.averages)


def of_state(
    state: Iterable[StateTensor],
    activations: float,
    ranks: int,
    shape_of: Callable[[StateTensor], tuple[int, ...]] = lambda tensor: tensor.shape,
) -> Weighed:
    """Adds up a framework's state by what it is; ``shape_of`` says what of it a rank has."""
    held = dict.fromkeys(("model", "optimizer", "ema"), 0)
    whole: dict[str, int] = {}
    gradients = 0
    for tensor in state:
        own = num_bytes(tensor, shape_of(tensor))
        kind = tensor.name.partition("/")[0]
        held[kind] = held.get(kind, 0) + own
        if kind == "model" and tensor.is_trained:
            gradients += max(own, 4 * math.prod(shape_of(tensor)))
        saved = num_bytes(tensor, tensor.cut.shape) if tensor.cut else own
        whole[tensor.name] = saved * (ranks if tensor.placement is Placement.RANK else 1)
    return Weighed(held["model"], gradients, held["optimizer"], held["ema"], activations, sum(whole.values()))


def num_bytes(tensor: StateTensor, shape: tuple[int, ...]) -> int:
    """Of a tensor's dtype in some shape."""
    return math.prod(shape) * (2 if tensor.dtype == "bfloat16" else np.dtype(tensor.dtype).itemsize)
