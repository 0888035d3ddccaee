"""Memory of a model whose parameters are sharded by rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch.nn import Module, Parameter

from hpctrain.backends.torch.device import Compute
from hpctrain.backends.torch.strategies.estimated import Estimated
from hpctrain.backends.torch.strategies.fsdp.fsdp_strategy import uncuttable
from hpctrain.backends.torch.strategies.fsdp.layers import layers_of
from hpctrain.backends.torch.strategies.fsdp.sharded_model import gathering
from hpctrain.backends.torch.strategies.memory_estimate import MemoryEstimate
from hpctrain.backends.torch.strategies.row_shares import part_of_rows
from hpctrain.config.features import Feature


def estimate(feature: Feature, model: Estimated) -> MemoryEstimate:
    """See estimated.Estimate."""
    keeps = feature is Feature.SHARD_GRADIENTS
    parts = model.framework.source.optimizer_state.every
    whole_tensors = uncuttable(model.shares, parts, model.traits)
    model.refuse({Feature.WHOLE_TENSORS: whole_tensors})
    every = model.parameters
    total = sum(one.nbytes for one in every)
    held = 0.0
    for one in every:
        share = part_of_rows(len(one), 0, model.rows)[1] / len(one) if one.ndim else 1.0
        held += share * one.nbytes
    layers = layers_of(model.framework.model, model.parallel.layers)
    compute = gathering(model.framework.model, model.framework.parts.compute)
    sizes = at_a_time(every, layers, compute, model.micro_batches, keeps)
    return in_rows(model.whole, held / max(total, 1), *sizes, model.micro_batches > 1, keeps, model.parallel.offload)


def at_a_time(
    every: Sequence[Parameter], layers: Sequence[Module], compute: Compute, micro_batches: int, keeps: bool
) -> tuple[int, int, int]:
    """Bytes of parameters, and of new and waiting gradients, that a rank has whole at a time; see ``in_rows``.

    Args:
        every: parameters of the rank's layers.
        layers: those of the model; others than the rank's count as empty.
        compute: the rank's precision.
        micro_batches: micro-batches per update.
        keeps: as for ``in_rows``.
    """
    known = {id(one) for one in every}
    total = sum(one.nbytes for one in every)
    sizes = sorted(sum(one.nbytes for one in layer.parameters() if id(one) in known) for layer in layers)
    narrow = 1 if compute.low_precision is None else 2
    few = (total - sum(sizes[:-2])) // narrow
    trained = sum(one.numel() * max(one.itemsize, 4) for one in every if one.requires_grad)
    if keeps:
        return total // narrow, few, 0
    return few, few, trained if micro_batches > 1 else 0


def in_rows(
    whole: MemoryEstimate,
    share: float,
    gathered: int,
    new: int,
    waiting: int = 0,
    accumulates: bool = False,
    keeps: bool = False,
    offloads: bool = False,
) -> MemoryEstimate:
    """The estimate for a model whose parameters are sharded.

    Args:
        whole: estimate without sharding.
        share: largest fraction of the state that a rank has.
        gathered: bytes of parameters that are gathered at a time: those outside layers, of one layer, and of the next.
        new: bytes of the whole gradients of as many layers, which backward passes make.
        waiting: bytes of whole gradients that wait for an update's last micro-batch, which makes rows of them.
        accumulates: whether gradients exist in forward passes, too.
        keeps: whether layers stay whole until the last backward pass, which frees them and makes rows of gradients.
        offloads: whether rows are in host memory.
    """
    rows = whole.scaled(parameters=share, gradients=share, optimizer=share, averages=share)
    summed = rows.gradients + waiting if offloads else max(rows.gradients, waiting)
    return dataclasses.replace(
        rows,
        parameters=rows.parameters + gathered,
        gradients=summed + new,
        late_gradients=new if accumulates else summed + new,
        copies=0,
        freed=min(gathered, rows.gradients) if keeps and not accumulates else 0,
        offloaded=sum(rows.parts.values()) if offloads else 0,
    )
