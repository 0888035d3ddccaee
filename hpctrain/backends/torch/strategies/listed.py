"""All strategies, in the order in which they are applied."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from hpctrain.backends.torch.strategies import (
    meta_init,
    sequence,
    strategy,
    tensor,
    zero1,
)
from hpctrain.backends.torch.strategies.estimated import Estimate
from hpctrain.backends.torch.strategies.fsdp import fsdp_memory, fsdp_strategy
from hpctrain.backends.torch.strategies.pipeline import pipeline_strategy
from hpctrain.backends.torch.strategies.strategy import Planner
from hpctrain.backends.torch.task import compiled, recompute
from hpctrain.config.features import Feature


@dataclass(frozen=True)
class Listed:
    """A strategy."""

    planned: Planner
    shard: Feature | None = None
    """The value of ``parallel.shard`` that requests it."""
    estimate: Estimate | None = None
    """Its memory, for ``hpctrain plan``; every value of ``parallel.shard`` has one."""


FSDP = [
    Listed(functools.partial(fsdp_strategy.planned, feature), feature, functools.partial(fsdp_memory.estimate, feature))
    for feature in (Feature.SHARD_PARAMETERS, Feature.SHARD_GRADIENTS)
]
STRATEGIES = (
    # cut layers
    Listed(tensor.planned),
    Listed(sequence.planned),
    Listed(compiled.planned),
    Listed(recompute.planned),
    # assign layers
    Listed(pipeline_strategy.planned),
    Listed(meta_init.planned),
    # partition updates
    *FSDP,
    Listed(zero1.planned, Feature.SHARD, zero1.estimate),
    Listed(strategy.planned),
)
