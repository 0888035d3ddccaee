"""Rows of all ranks in one tensor, through which gradients flow back to where the rows come from."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hpctrain.comm.group import Group
from hpctrain.train.clock import Phase, StepClock

HALVES = (torch.bfloat16, torch.float16)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group, clock: StepClock) -> Tensor:
        ctx.group, ctx.clock, ctx.rows = group, clock, len(tensor)
        host = tensor.detach().cpu().contiguous()
        values = (host.view(torch.int16) if host.dtype == torch.bfloat16 else host).numpy()
        ctx.begin = sum(group.allgather(len(tensor), "say how many rows they gather")[: group.rank])
        everything = torch.from_numpy(group.allgather_array(values, "gather their rows"))
        rows = everything.view(tensor.dtype) if tensor.dtype == torch.bfloat16 else everything
        clock.mark(Phase.EXCHANGE)
        return rows.to(tensor.device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        ctx.clock.mark(Phase.BACKWARD)
        wide = gradient.to("cpu", torch.float32 if gradient.dtype in HALVES else gradient.dtype).contiguous()
        total = ctx.group.sum(wide.numpy(), "sum the gradients of gathered rows")
        ctx.clock.mark(Phase.EXCHANGE)
        own = torch.from_numpy(total[ctx.begin : ctx.begin + ctx.rows])
        return own.to(gradient.device, gradient.dtype), None, None


def gathered(tensor: Tensor, group: Group, clock: StepClock) -> Tensor:
    """The rows of all ranks, in rank order. Collective, and so is the backward pass.

    Args:
        tensor: [n, ...], equal on all ranks but for n.
        group: the ranks.
        clock: told of the time that is spent together.
    """
    rows: Tensor = _Gather.apply(tensor, group, clock)  # type: ignore[no-untyped-call]
    return rows
