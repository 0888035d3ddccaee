"""``parallel.shard: gradients``: FSDP2 whose layers stay whole from the forward to the backward pass (ZeRO-2).

Gradients are summed, and freed, after each micro-batch.
"""

from __future__ import annotations

import functools

from hpctrain.backends.torch.strategies.estimated import Estimated
from hpctrain.backends.torch.strategies.fully_sharded import estimate_rows, shard
from hpctrain.backends.torch.strategies.memory_estimate import MemoryEstimate
from hpctrain.backends.torch.strategies.strategy import Opening, Strategy
from hpctrain.config.features import Feature


def planned(opening: Opening) -> Strategy | None:
    """The strategy, if the run shards gradients. Raises UserError if an optimizer cannot be sharded."""
    if not opening.divides(Feature.SHARD_GRADIENTS):
        return None
    return functools.partial(shard, opening, opening.traits, True)


def estimate(model: Estimated) -> MemoryEstimate:
    """See estimated.Estimate."""
    return estimate_rows(model, keeps=True)
