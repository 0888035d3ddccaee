"""Parameters on the meta device get memory once other strategies have cut them or assigned them to stages."""

from __future__ import annotations

import functools

import torch
from torch.nn import Module, Parameter

from hpctrain.backends.torch.strategies.strategy import PreparedModel, Strategy, StrategyContext


def planned(context: StrategyContext) -> Strategy | None:
    """The strategy that allocates parameters on the meta device, unless they are sharded by rows first."""
    return None if context.gathers or not context.compute.allocates else functools.partial(materialize, context)


def materialize(context: StrategyContext, prepared: PreparedModel) -> PreparedModel:
    """Allocates parameters on the meta device after other strategies have partitioned them."""
    give_memory(context.model, context.compute.device)
    return prepared


def give_memory(model: Module, device: torch.device) -> None:
    """Allocates zeros for parameters on the meta device; the Parameter objects stay the same."""
    for parameter in model.parameters():
        if parameter.is_meta:
            made = Parameter(torch.zeros_like(parameter, device=device), parameter.requires_grad)
            made.__dict__.update(vars(parameter))
            torch.utils.swap_tensors(parameter, made)
