"""``parallel.pipeline``: each rank of a pipeline group has consecutive layers, and passes micro-batches to the next."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping

import numpy as np
from torch.nn import Module

from hpctrain.backends.named_state import parameter_of, plain_name
from hpctrain.backends.torch.reduce.reducer import Reducer
from hpctrain.backends.torch.strategies.estimated import Estimated
from hpctrain.backends.torch.strategies.memory_estimate import MemoryEstimate, of_state
from hpctrain.backends.torch.strategies.partition import Partition
from hpctrain.backends.torch.strategies.pipeline.layer_parts import held_by
from hpctrain.backends.torch.strategies.pipeline.layer_times import Whole
from hpctrain.backends.torch.strategies.pipeline.pipelined import PipelineForwardBackward
from hpctrain.backends.torch.strategies.pipeline.stage import Stage
from hpctrain.backends.torch.strategies.pipeline.stage_schedule import most_held
from hpctrain.backends.torch.strategies.pipeline.stage_state import StageState
from hpctrain.backends.torch.strategies.pipeline.stages import (
    FIELD,
    StageModel,
    Stages,
    keep_stages,
    layers_of,
    staged,
    tied_parameters,
)
from hpctrain.backends.torch.strategies.pipeline.tied import Tied
from hpctrain.backends.torch.strategies.strategy import PreparedModel, Strategy, StrategyContext
from hpctrain.config.combinations import stated
from hpctrain.config.features import TRAITS, Feature, Trait
from hpctrain.errors import UserError, foreign_errors
from hpctrain.system.user_errors import own_line, words
from hpctrain.tasks.definition import TorchTask
from hpctrain.train.clock import Neighbours, Waiting


def planned(context: StrategyContext) -> Strategy | None:
    """The strategy, if the run has a pipeline. Raises UserError if the model or its optimizers cannot be divided."""
    if Feature.PIPELINE in context.features:
        context.traits  # noqa: B018  raises if an optimizer may couple parameters
    parallel = context.config.parallel
    stages = stages_of(context.task, context.model, parallel.pipeline, parallel.pipeline_chunks)
    if stages is None or context.world.pipeline.size == 1:
        return None
    require_copies(context, stages)
    require_modules(context, stages)
    return functools.partial(divide, context, stages)


def require_copies(context: StrategyContext, stages: Stages) -> None:
    """Raises UserError if stages cannot have copies of the parameters that they share."""
    name = next(iter(tied_parameters(context.model, stages)), None)
    shard = next((one for one in context.features if Trait.REDUCE_SCATTERS in TRAITS.get(one, ())), None)
    if name is not None and shard is not None:
        raise UserError(
            f"layers of several stages share {name}, and {stated(shard, None)}: no rank has the whole gradient",
            "untie the layers, or leave parallel.shard out",
        )


def require_modules(context: StrategyContext, stages: Stages) -> None:
    """Raises UserError if a layer holds a parameter itself, and sharding would replace it."""
    held = next((one for layer in stages.layers if (one := held_by(layer.call)) is not None), None)
    if held is not None and context.gathers:
        raise UserError(
            f"a function in {FIELD} holds {context.names().get(id(held), 'a parameter')} itself, which parallel.shard "
            "replaces by rows of it",
            "give a method of the model, such as model.embed, or functools.partial(function, module), and read the "
            "parameter from the module",
        )


def stages_of(task: TorchTask, model: Module, ranks: int, chunks: int) -> Stages | None:
    """Divides a model into stages; None for one rank. Raises UserError if that is impossible."""
    if ranks == 1:
        return None

    def explained(error: Exception) -> UserError:
        text = f"{type(error).__name__}: {words(error)}{own_line(error)}"
        return UserError(f"{FIELD} fails: {text}", "it gets the model of the task, and returns its layers")

    with foreign_errors(explained):
        layers = layers_of(model, task.layers)
    return staged(model, layers, ranks, chunks)


def divide(context: StrategyContext, stages: Stages, prepared: PreparedModel) -> PreparedModel:
    """Leaves this rank the layers of its stages."""
    world = context.world
    model = context.model
    compute = context.compute
    whole = Whole(context.task, model, context.task_state, prepared.partition, compute)
    stages = whole.chosen(stages, context.stage_choice, world)
    require_copies(context, stages)  # those that were planned may have needed none
    exchange = context.exchange(world.pipeline, Neighbours.PIPELINE)
    holders = tied_parameters(model, stages)
    elsewhere = keep_stages(model, stages, world.pipeline.rank, context.optimizers)
    names = frozenset(plain_name(name) for name, _ in model.named_parameters())
    own = stages.of(world.pipeline.rank)
    stage = Stage(world.pipeline, compute.device, context.clock, exchange, len(own))
    tied = Tied(world.pipeline.rank, holders, exchange)
    root = StageModel(model, own)
    waiting = Waiting(context.clock, Neighbours.PIPELINE)

    def total_norm(partition: Partition, reducer: Reducer) -> float:
        norm = tied.norm(partition, reducer) if tied.holders else partition.norm(reducer)
        with waiting:
            squares = world.pipeline.gather(np.array([norm * norm]), "add up the squares of the gradients")
        return math.sqrt(float(squares.sum()))

    return dataclasses.replace(
        prepared,
        root=root,
        forward_backward=functools.partial(
            PipelineForwardBackward, root, stage, shares=stages.shares(world.pipeline.rank)
        ),
        num_layers=sum(map(len, own)),
        total_norm=total_norm,
        complete=tied.add,
        placed=StageState(world, names, holders, elsewhere).placed,
        close=exchange.close,
    )


def estimate(model: Estimated, shards: Callable[[Estimated], Mapping[str, MemoryEstimate]]) -> MemoryEstimate:
    """Estimates the rank with the largest state, with the activations of the first one; all layers are assumed to keep
    equally much. Raises UserError if the model cannot be divided.

    Args:
        model: the whole model.
        shards: estimates such a rank with sharded state; see MemoryEstimate.
    """
    framework = model.framework
    whole = model.whole
    chunks = model.parallel.pipeline_chunks
    stages = stages_of(framework.task, framework.model, model.pipeline, chunks)
    assert stages is not None, "there are several"
    activations = whole.activations * most_held(model.pipeline, model.micro_batches, chunks) / len(stages.ranges)
    all_names = framework.source.optimizer_state.names
    found = []
    for rank in range(model.pipeline):
        held = stages.held(rank)
        names = {all_names[one] for one in held & all_names.keys()}
        own = of_state([one for one in model.state if parameter_of(one.name) in names], activations, 1)
        found.append(dataclasses.replace(model, whole=dataclasses.replace(own, checkpoint=whole.checkpoint), held=held))
    most = max(found, key=lambda one: sum(one.whole.parts.values()))
    has_copies = bool(tied_parameters(framework.model, stages))
    sharded = {} if has_copies else shards(most)
    # What backward passes free, forward passes of later micro-batches gather again.
    return dataclasses.replace(
        most.whole, shards={word: dataclasses.replace(one, freed=0) for word, one in sharded.items()}
    )
