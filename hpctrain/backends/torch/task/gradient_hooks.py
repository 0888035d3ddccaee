"""Tries the hooks on gradients of parameters: they get a rank's share of the average, so they must be linear."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from hpctrain.errors import UserError

SCALES = (1e-3, 1.0, 1e3)
"""Magnitudes of the gradients on which hooks are tried, so that a limit shows."""
TOLERANCE, TOLERANCE_16_BITS = 1e-3, 3e-2
"""Allowed difference, relative to the largest element."""


def require_linear_hooks(model: Module) -> None:
    """Raises UserError if a hook on a parameter's gradient clips it, adds noise, or updates the parameter.

    Ranks and micro-batches would do so with their shares of the averaged gradient. Hooks that look, scale or mask are
    linear. Hooks of modules and activations see the gradient of the mean over the global batch, as in one process.
    """
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            if (
                parameter.numel()
                and not parameter.is_meta
                and not all(map(partial(is_linear, parameter), hooks_of(parameter)))
            ):
                raise UserError(
                    f"{name} has a hook on its gradient that is not linear (it limits, normalises or randomises it, or "
                    "updates the parameter), and would get a share of each rank and micro-batch",
                    "call optimizer.register_step_pre_hook, whose hooks see the averaged gradients, or set "
                    "train.clip_norm",
                )


def hooks_of(parameter: Parameter) -> Iterator[Callable[[Tensor], Tensor | None]]:
    """A parameter's hooks, as functions that return what becomes of a gradient."""
    for hook in (parameter._backward_hooks or {}).values():
        yield partial(replaced, hook)
    for hook in (parameter._post_accumulate_grad_hooks or {}).values():
        yield partial(accumulated, parameter, hook)
    if hasattr(parameter, "_in_backward_optimizers"):  # of torch.distributed.optim, whose hook is hidden
        yield lambda gradient: None


def replaced(hook: Callable[[Tensor], Tensor | None], gradient: Tensor) -> Tensor:
    """What a hook returns, or what it made of the gradient in place."""
    found = hook(gradient)
    return gradient if found is None else found


def accumulated(parameter: Parameter, hook: Callable[[Any], None], gradient: Tensor) -> Tensor | None:
    """What a hook after accumulation leaves in ``grad``; None if it updates the parameter, which is undone."""
    values, before, parameter.grad = parameter.clone(), parameter.grad, gradient
    hook(parameter)
    left, parameter.grad = parameter.grad, before
    if torch.equal(values, parameter):
        return left
    parameter.copy_(values)
    return None


def is_linear(parameter: Parameter, hook: Callable[[Tensor], Tensor | None]) -> bool:
    """Whether f(g - 3 h) = f(g) - 3 f(h), and f(g) is the same each time."""
    random = torch.Generator().manual_seed(0)
    tolerance = TOLERANCE_16_BITS if parameter.dtype.itemsize < 4 else TOLERANCE
    for scale in SCALES:
        first, second = (
            scale
            * torch.randn(parameter.shape, generator=random, dtype=parameter.dtype, device="cpu").to(parameter.device)
            for _ in range(2)
        )
        try:
            one, again, other, both = (hook(g.clone()) for g in (first, first, second, first - 3 * second))
        except Exception:  # the user's; it may need what only a backward pass has
            return False
        if one is None or again is None or other is None or both is None or not torch.equal(one, again):
            return False
        if not (both - one + 3 * other).abs().max() <= tolerance * max(one.abs().max(), other.abs().max()):
            return False
    return True
