"""Parameters on the meta device get memory once other strategies have cut them or assigned them to stages."""

from __future__ import annotations

import functools

import torch
from torch.nn import Module, Parameter

from hpctrain.backends.torch.strategies.strategy import Opening, Prepared, Strategy


def planned(opening: Opening) -> Strategy | None:
    """The strategy that allocates parameters on the meta device, unless they are sharded by rows first."""
    return None if opening.gathers or not opening.compute.allocates else functools.partial(materialize, opening)


def materialize(opening: Opening, prepared: Prepared) -> Prepared:
    """Allocates parameters on the meta device after other strategies have partitioned them."""
    give_memory(opening.model, opening.compute.device)
    return prepared


def give_memory(model: Module, device: torch.device) -> None:
    """Allocates zeros for parameters on the meta device; the Parameter objects stay the same."""
    for parameter in model.parameters():
        if parameter.is_meta:
            made = Parameter(torch.zeros_like(parameter, device=device), parameter.requires_grad)
            made.__dict__.update(vars(parameter))
            torch.utils.swap_tensors(parameter, made)
