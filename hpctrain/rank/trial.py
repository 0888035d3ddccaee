"""Opens a task outside a run: to try it on one batch (``hpctrain doctor``), or to estimate memory.

To estimate a rank's memory under a parallel plan, one process makes the model as that rank would and trains it for one
step. Each strategy's module in ``backends/torch/strategies`` then adds what it needs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

import psutil

from hpctrain.backends.torch.strategies.memory_estimate import MemoryEstimate, num_bytes
from hpctrain.checkpoint.frozen import is_common
from hpctrain.comm.imagined import Imagined
from hpctrain.comm.world import World, alone
from hpctrain.config.combinations import clash
from hpctrain.config.features import Feature
from hpctrain.config.sections import SHARDS, Config, ParallelConfig
from hpctrain.errors import UserError, foreign_errors
from hpctrain.rank import wiring
from hpctrain.rank.batches import first_batch, first_validation, make_data
from hpctrain.rank.problem import Problem, make_problem, require_same_data
from hpctrain.rank.session import message
from hpctrain.system.user_errors import advised
from hpctrain.tasks.definition import TorchTask
from hpctrain.train.clock import IntervalClock
from hpctrain.train.evaluation import even_batches

if TYPE_CHECKING:
    from hpctrain.backends.torch.torch_framework import TorchFramework

MOST_SAMPLES = 32
"""Maximum samples in the batch, since this one process would otherwise hold the batch of all ranks."""


def try_task(config: Config) -> str:
    """Makes the task in this process, calls its model, loss and metrics on the first samples, and starts data workers.

    Writes nothing.

    Returns:
        Which arrays model and loss get.

    Raises:
        HpctrainError: the task cannot be trained; names the field of the task and the user's line.
    """
    config = dataclasses.replace(config, reduce=dataclasses.replace(config.reduce, kind="none", compression="none"))
    with foreign_errors(in_short):
        return tried(config, alone(), nullcontext, MOST_SAMPLES)


def tried(
    config: Config, world: World, phase: Callable[[str], AbstractContextManager[object]], most: int | None = None
) -> str:
    """Does what a run does up to its first step, without a run folder; see ``try_task``. Collective.

    ``phase`` is ``Session.phase``; ``most`` limits the samples of the batch.
    """
    with phase("make the task"):
        problem = make_problem(config, world)
        wiring.require_watched(config.features(), problem.validation, problem.task)
    require_same_data(problem, world)
    with closing(wiring.make_framework(config, world, problem.task, IntervalClock())) as framework:
        with phase("try the task on one batch"):
            batch = first_batch(problem, world, most)
            validation = first_validation(problem)
            for one, _ in even_batches([batch] if batch else [], framework.sync_group):
                framework.dry_call(one, validation)
        with phase("read the first batch"), closing(make_data(problem, world, framework.host.place)) as data:
            if problem.loading.workers:
                next(data.starting_at(0, 0))
        return problem.described(batch)


def in_short(error: Exception) -> UserError:
    """Returns a UserError for an error in the task's own code; it names the line."""
    what, _ = message(error)
    return UserError(what, advised("correct the task", what))


ESTIMATED_SAMPLES = 8
"""Samples in the measured batch; activation memory is proportional to the batch size."""


UNKNOWN_NODE = 8
"""Ranks on each node, if the run file does not say how many."""


def node_size(config: Config, ranks: int) -> int:
    """Returns the number of ranks on each node."""
    return config.launch.ranks_per_node or config.launch.slurm.gpus_per_node or min(ranks, UNKNOWN_NODE)


def program_bytes() -> int:
    """Returns this process's resident memory in bytes, with PyTorch imported; call it before there is a model."""
    import hpctrain.backends.torch.torch_framework  # noqa: F401  its memory belongs to the program, not to the model

    return int(psutil.Process().memory_info().rss)


@dataclasses.dataclass(frozen=True)
class Model:
    """A run's model in this process, with its task and data."""

    problem: Problem
    framework: TorchFramework
    world: World


def layout(config: Config, tensor: int, pipeline: int, **keys: Any) -> ParallelConfig:
    """A plan with these sizes, and the chunks of the run file."""
    chunks = config.parallel.pipeline_chunks if pipeline > 1 else 1
    return ParallelConfig(tensor=tensor, pipeline=pipeline, pipeline_chunks=chunks, **keys)


@contextmanager
def made(config: Config, tensor: int, pipeline: int = 1) -> Iterator[Model]:
    """Makes the model as the first rank of a tensor group has it, with unsharded optimizer state.

    Raises UserError, also for errors of the task's own code, here or in the body.
    """
    config = dataclasses.replace(
        config,
        parallel=layout(config, tensor, pipeline, sequence=config.parallel.sequence and tensor > 1),
        reduce=dataclasses.replace(config.reduce, kind="none", compression="none"),
    )
    world = dataclasses.replace(alone(), tensor=Imagined("tensor", range(tensor)))
    with foreign_errors(in_short):
        from hpctrain.backends.torch.torch_framework import TorchFramework

        problem = make_problem(config, alone())
        if not isinstance(problem.task, TorchTask):
            what = f"{config.task} is a KerasTask, whose model every rank holds whole"
            raise UserError(what, "only models of a TorchTask can be split")
        with closing(wiring.make_framework(config, world, problem.task, IntervalClock())) as framework:
            assert isinstance(framework, TorchFramework), "of a TorchTask"
            yield Model(problem, framework, world)


def estimate(
    config: Config, tensor: int, ranks: int, pipelines: Sequence[int] = ()
) -> tuple[MemoryEstimate, dict[str, str]]:
    """Estimates the memory of the first rank of a tensor group.

    Args:
        config: run configuration; the task is rebuilt.
        tensor: size of the tensor group.
        ranks: number of ranks of the run.
        pipelines: numbers of stages to estimate; those for which the model has too few layers are left out.

    Returns:
        The estimate, with one for each value of ``parallel.shard`` and number of stages that works; and the reason
        for each value of ``parallel.shard`` that does not.

    Raises:
        UserError: the model cannot be partitioned that way, or cannot be trained; names the layer.
    """
    from hpctrain.backends.torch.strategies.estimated import Estimated, measured
    from hpctrain.backends.torch.strategies.listed import STRATEGIES
    from hpctrain.backends.torch.strategies.pipeline import pipeline_strategy as of_stages

    with made(config, tensor) as model:
        state, whole = measured(model.framework, first_batch(model.problem, model.world, ESTIMATED_SAMPLES), ranks)
    if config.checkpoint.frozen == "source":
        left = sum(
            num_bytes(one, one.whole) for one in state if is_common(one.name, one.placement) and not one.is_trained
        )
        whole = dataclasses.replace(whole, checkpoint=whole.checkpoint - left)
    reasons: dict[str, str] = {}
    if ranks == tensor:
        return whole, reasons
    with made(config, tensor) as model:
        framework = model.framework  # new, so that its optimizers have no state yet
    estimates = {one.shard: one.estimate for one in STRATEGIES if one.estimate}
    node = node_size(config, ranks) if config.parallel.shard_within == "node" else ranks

    def under(pipeline: int) -> Estimated:
        data = ranks // tensor // pipeline
        rows = min(data, max(node // tensor, 1))
        return Estimated(framework, state, whole, {}, data, rows, pipeline, config.train.accumulate, config.parallel)

    def shards(plan: Estimated) -> dict[str, MemoryEstimate]:
        found: dict[str, MemoryEstimate] = {}
        for word, feature in SHARDS.items():
            if plan.data == 1 or (tensor > 1 and clash({Feature.TENSOR: tensor, feature: True})):
                continue
            try:
                parallel = layout(config, tensor, plan.pipeline, shard=word)
                uses = dataclasses.replace(config, parallel=parallel).features()
                one = estimates[feature](dataclasses.replace(plan, features=uses))
                found |= {} if one is None else {word: one}
            except UserError as error:
                reasons.update({word: error.what} if plan.pipeline == 1 else {})
        return found

    stages: dict[int, MemoryEstimate] = {}
    for pipeline in pipelines:
        with suppress(UserError):
            stages[pipeline] = of_stages.estimate(under(pipeline), shards)
    return dataclasses.replace(whole, stages=stages, shards=shards(under(1))), reasons


def require_stages(config: Config, pipeline: int) -> None:
    """Raises UserError if a run's model cannot be split into that many stages."""
    with made(config, 1, pipeline):
        pass
