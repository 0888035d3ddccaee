"""Makes FSDP2 sum the same gradients on all ranks: it leaves out parameters that this rank has not used."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule


def sum_unused(module: FSDPModule) -> None:
    """Makes backward passes sum gradients of unused parameters, too, for which PyTorch has a setting since 2.13."""
    if hasattr(module, "set_reduce_scatter_unused_params"):
        module.set_reduce_scatter_unused_params(True)
        return
    for group in groups_of(module):
        group.post_backward = functools.partial(complete_gradients, group, group.post_backward)


def complete_gradients(group: Any, post_backward: Callable[..., None], *ignored: Any) -> None:
    """Ends the backward pass of a group of parameters; if it sums, each of them has a gradient, or has had one."""
    if group.reduce_grads:
        for one in group.fsdp_params:
            # A rank that has not used the group has not gathered it: it has no whole parameters.
            if one.sharded_param.requires_grad and hasattr(one, "_unsharded_param"):
                parameter = one.unsharded_param
                if parameter.grad is None and one.unsharded_accumulated_grad is None:
                    parameter.grad = torch.zeros_like(parameter)
    post_backward(*ignored)


def complete_sums(modules: Sequence[FSDPModule]) -> None:
    """Before an update's last backward pass, gives zeros to parameters that no earlier one has used: FSDP2 has added up
    gradients in 32 bits, and takes none of 16 bits with them."""
    for group in (group for module in modules for group in groups_of(module)):
        sums = [one.unsharded_accumulated_grad for one in group.fsdp_params]
        known = next((one for one in sums if one is not None), None)
        for one, added in zip(group.fsdp_params, sums, strict=True):
            if known is not None and added is None and one.sharded_param.requires_grad:
                one.unsharded_accumulated_grad = known.new_zeros(one.sharded_param.shape)


def groups_of(module: FSDPModule) -> Iterator[Any]:
    """The groups of parameters (FSDPParamGroup) that are gathered with a module. PyTorch 2.11 knows at most one."""
    state = module._get_fsdp_state()
    found = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return (group for group in found if group is not None)
