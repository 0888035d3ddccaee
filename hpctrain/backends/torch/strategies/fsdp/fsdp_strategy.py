"""The strategy that shards all parameters, gradients and optimizer state by rows."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hpctrain.backends.torch.process_groups import DefaultGroup
from hpctrain.backends.torch.state.optimizer import OptimizerPart, Slots
from hpctrain.backends.torch.steps.updates import FixedReducerFactory
from hpctrain.backends.torch.strategies.fsdp.fsdp_reducer import FullyShardedReducer
from hpctrain.backends.torch.strategies.fsdp.sharded_model import LocalParameter, shard_groups, shard_model
from hpctrain.backends.torch.strategies.parameter_traits import OwnRows, ParameterTraits, plain, shard_optimizers
from hpctrain.backends.torch.strategies.row_shares import RowRange
from hpctrain.backends.torch.strategies.strategy import (
    ParameterUpdates,
    PreparedModel,
    Strategy,
    StrategyContext,
    needs_norm,
)
from hpctrain.backends.torch.task.shares import ONLY, Share
from hpctrain.config.combinations import refuse
from hpctrain.config.features import Feature, used
from hpctrain.errors import UserError
from hpctrain.reduce.candidates import Candidate

OLDEST = "2.11"
"""The oldest PyTorch whose FSDP2 is known to give the numbers of one process."""


def is_too_old() -> bool:
    """Whether FSDP2 needs a newer PyTorch than this."""
    return torch.__version__ < OLDEST


def require_torch() -> None:
    """Raises UserError if this PyTorch is too old."""
    if is_too_old():
        raise UserError(
            f"parallel.shard: parameters and gradients need PyTorch {OLDEST} or newer, and this is {torch.__version__}",
            f"pip install 'torch>={OLDEST}'; or set parallel.shard to optimizer",
        )


def planned(feature: Feature, context: StrategyContext) -> Strategy | None:
    """The strategy, if the run shards parameters or, by another feature, gradients. Raises UserError if an optimizer
    cannot be sharded."""
    return functools.partial(shard, context, context.traits) if context.divides(feature) else None


def shard(context: StrategyContext, traits: ParameterTraits, prepared: PreparedModel) -> PreparedModel:
    """Leaves this rank its rows of each parameter. Collective.

    Args:
        context: the run.
        traits: traits of the parameters.
        prepared: the part of the model that this rank has.

    Raises:
        UserError: this PyTorch is too old, or optimizers or nodes cannot be divided.
    """
    require_torch()
    model = context.model
    world = context.world
    config = context.config.parallel
    names = context.names()
    found = uncuttable(context.shares(), context.parts, traits)
    refuse({**context.features, **used({Feature.WHOLE_TENSORS: found})})
    whole = list(model.parameters())
    group = DefaultGroup(world.data, context.compute.device)
    groups = shard_groups(world, context.compute.device, config.shard_within == "node")
    partition = shard_model(model, prepared.partition, groups, context.compute, config, prepared.root)
    every = partition.every
    mine = {id(before): own_rows(one, before) for one, before in zip(every, whole, strict=True) if one.rows}
    shard_optimizers(context.optimizers, mine)
    reducer = functools.partial(
        FullyShardedReducer, partition=partition, ranks=group, needs_norm=needs_norm(context, partition)
    )
    updates = ParameterUpdates(
        {ONLY: Share([(one.name, one.own) for one in every if one.own.requires_grad])},
        {**names, **{id(one.own): one.name for one in every}},
        Slots({id(one.own): one.rows for one in every if one.rows}),
        {ONLY: FixedReducerFactory(Candidate(group.word, "sharded"), lambda one, _: reducer(one.name))},
    )
    return dataclasses.replace(prepared, partition=partition, updates=updates)


def own_rows(one: LocalParameter, whole: Tensor) -> OwnRows | None:
    """What the optimizer gets in place of a whole parameter; None if this rank has no row of it."""
    assert one.rows is not None and one.rows.rows is not None, "it is not a scalar"
    begin, end = one.rows.rows.start, one.rows.rows.stop
    return OwnRows(RowRange(0, 0, begin, end, len(whole)), one.own) if begin < end else None


def uncuttable(shares: Mapping[str, Share], parts: Sequence[OptimizerPart], traits: ParameterTraits) -> str | None:
    """Names the first parameter that cannot be split by rows, and its optimizer; None if all can be."""
    names = {id(parameter): name for share in shares.values() for name, parameter in share.pairs}
    for optimizer in plain(parts):
        for one in (one for settings in optimizer.param_groups for one in settings["params"]):
            if id(one) in names and not one.numel():
                return f"{names[id(one)]} has no elements"
            if id(one) in names and one.ndim and len(one) > 1 and id(one) not in traits.elementwise:
                return f"{type(optimizer).__name__} does not update the rows of {names[id(one)]} by themselves"
    return None
