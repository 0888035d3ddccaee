"""Whether an optimizer may update a part of a parameter by itself: it is asked, on a small tensor."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from hpctrain.errors import UserError

STEPS = 3
SIZE = 6
"""Of each axis of the tensor that is tried."""


def require_elementwise(optimizer: Optimizer, parameter: Tensor, name: str, axis: int) -> None:
    """Raises UserError if an optimizer does to halves of a tensor something else than to the whole one, in any bit.

    Args:
        optimizer: of which a copy is tried; not changed.
        parameter: that is to be cut, whole; one of the optimizer's or not.
        name: of the parameter.
        axis: along which it is to be cut.
    """
    group = next((it for it in optimizer.param_groups if any(one is parameter for one in it["params"])), None)
    if group is None:
        return
    random = torch.Generator().manual_seed(1)
    shape = (SIZE,) * parameter.ndim
    value, *gradients = (torch.randn(shape, generator=random).to(parameter.dtype) for _ in range(1 + STEPS))
    slots = {key: small(slot, parameter, shape) for key, slot in optimizer.state.get(parameter, {}).items()}
    kind = type(optimizer).__name__
    before = torch.get_rng_state()
    try:
        (whole,) = stepped(optimizer, group, slots, [value], [[one] for one in gradients])
        halves = [one.chunk(2, axis) for one in gradients]
        own = [{k: v.chunk(2, axis)[n] if is_like(v, value) else v for k, v in slots.items()} for n in range(2)]
        parts = [
            stepped(optimizer, group, own[n], [value.chunk(2, axis)[n]], [[one[n]] for one in halves])[0]
            for n in range(2)
        ]
    except Exception as error:
        raise UserError(
            f"{kind} cannot be tried on a small copy of {name}, which is cut: {type(error).__name__}: {error}",
            "use an optimizer that updates what is in its param_groups, such as AdamW, or leave the layer whole",
        ) from error
    finally:
        torch.set_rng_state(before)
    if not torch.equal(whole, torch.cat(parts, axis)):
        raise UserError(
            f"{kind} looks at more than one element of {name} at a time, and each rank has a part of it only",
            "use an optimizer that updates each element by itself, such as AdamW, or leave the layer whole",
        )


def is_like(slot: Any, parameter: Tensor) -> bool:
    """Whether a slot has a value for each element of its parameter."""
    return isinstance(slot, Tensor) and slot.shape == parameter.shape


def small(slot: Any, parameter: Tensor, shape: tuple[int, ...]) -> Any:
    """A slot as a parameter of another shape would have it, from its first value."""
    return torch.full(shape, float(slot.flatten()[0]), dtype=slot.dtype) if is_like(slot, parameter) else slot


def stepped(
    optimizer: Optimizer,
    group: dict[str, Any],
    slots: dict[str, Any],
    values: Sequence[Tensor],
    gradients: Sequence[Sequence[Tensor]],
) -> list[Tensor]:
    """Values after a few steps of a copy of an optimizer, which has them in place of a group's, and no hooks."""
    stand_in: Optimizer = object.__new__(type(optimizer))
    parameters = [Parameter(value.clone()) for value in values]
    left_out = ("param_groups", "state", "step")  # a scheduler wraps ``step``
    own = {key: OrderedDict() if key.startswith("_optimizer_") else it for key, it in vars(optimizer).items()}
    kept = {key: it for key, it in own.items() if key not in left_out}
    settings = {key: copy.deepcopy(it) for key, it in group.items() if key not in ("params", "param_names")}
    state: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
    state.update({one: copy.deepcopy(slots) for one in parameters} if slots else {})
    vars(stand_in).update(copy.deepcopy(kept, {id(optimizer): stand_in}))
    vars(stand_in).update(param_groups=[settings | {"params": parameters}], state=state)
    torch.manual_seed(0)
    for gradient in gradients:
        for parameter, one in zip(parameters, gradient, strict=True):
            parameter.grad = one.clone()
        type(optimizer).step(stand_in)
    return [parameter.detach() for parameter in parameters]
