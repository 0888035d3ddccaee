"""Asks an optimizer how its parameters may be shared out among ranks, or cut: it is tried on small tensors.

Optimizers that look at one element at a time can update rows of a tensor apart; others (Adafactor, Muon) look at whole
tensors, and some at all of them together (Prodigy). Which is which is not for a list of names to say.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer, SparseAdam

from hpctrain.errors import UserError
from hpctrain.parallel.trial import LEAST_RATE, STEPS, rows_of, small

HALVED_SIZE = 6
"""Of each axis of a tensor that is tried in halves."""
ROUNDED = {torch.float32: 1e-4, torch.float64: 1e-12}
"""How much of an update rounding may change. What looks at whole tensors changes more than a hundredth."""
Group = dict[str, Any]
Slots = dict[str, Any]
Tried = tuple[Tensor, list[Tensor]]
"""A value, and the gradient of each step."""


@dataclass(frozen=True)
class Verdict:
    """How a parameter may be shared out."""

    is_alone: bool
    """Whether its update depends on nothing of other parameters: else it cannot be shared out at all."""
    by_rows: bool = False
    """Whether its rows are updated apart from each other, with the same bits."""
    nearly_by_rows: bool = False
    """The same to rounding: kernels may treat the end of a tensor in another way than its middle."""
    common: frozenset[str] = frozenset()
    """Slots that are not cut with the rows, such as a count of steps."""


@dataclass(frozen=True)
class Trial:
    """What became of one tensor in a few steps."""

    value: Tensor
    slots: Slots


def try_optimizer(optimizer: Optimizer, group: Group, parameter: Parameter) -> Verdict:
    """Updates a small tensor of a parameter's kind alone, beside another one, and cut into rows. Changes global random
    states, and nothing of the optimizer.

    Args:
        optimizer: as the task made it.
        group: one of its groups.
        parameter: of that group.

    Raises:
        UserError: the optimizer does not update what is in its groups, or fails.
    """
    state = optimizer.state.get(parameter, {})
    shape = small(tuple(parameter.shape))
    random = torch.Generator().manual_seed(1)

    device = torch.device("cpu") if parameter.is_meta else parameter.device

    def drawn(scale: float) -> Tensor:
        return (scale * torch.randn(shape, generator=random)).to(device, parameter.dtype)

    scale = min(1.0, 10 * rate_of(group))  # so that 16 bits show an update, too
    values, other = [(drawn(times * scale), [drawn(times) for _ in range(STEPS)]) for times in (1.0, 3.0)]
    begun = {name: corner(value, tuple(parameter.shape), shape) for name, value in state.items()}
    try:
        alone = run(optimizer, group, [values], begun)[0]
        beside = run(optimizer, group, [values, other], begun)[0]
        rows = rows_of(shape)
        parts = [run(optimizer, group, [cut(values, part)], cut_slots(begun, shape, part))[0] for part in rows]
    except Exception as error:
        raise UserError(
            f"{type(optimizer).__name__} fails on a small copy of its parameters, by which it is tried before its "
            f"state is sharded: {type(error).__name__}: {error}",
            "use an optimizer that updates what is in its param_groups, or leave parallel.shard out",
        ) from error
    if torch.equal(alone.value, values[0]):
        raise UserError(
            f"{type(optimizer).__name__} does not update what is in its param_groups, so that its state cannot be "
            "sharded",
            "use an optimizer whose step goes through its param_groups, or leave parallel.shard out",
        )
    common = frozenset(name for name, slot in alone.slots.items() if not is_whole(slot, shape))
    is_alone = torch.equal(alone.value, beside.value) and equal_slots(alone.slots, beside.slots)
    by_rows = len(rows) > 1 and fits(alone, parts, common)
    most, update = ROUNDED.get(parameter.dtype, 0.0), distance(alone.value, values[0])
    nearly = by_rows or (len(rows) > 1 and fits(alone, parts, common, most, update))
    return Verdict(is_alone, by_rows, nearly, common)


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
    shape = (HALVED_SIZE,) * parameter.ndim
    value, *gradients = (torch.randn(shape, generator=random).to(parameter.dtype) for _ in range(1 + STEPS))
    begun = {slot: even(it, parameter, shape) for slot, it in optimizer.state.get(parameter, {}).items()}
    own = [{slot: halves(it, shape, axis)[n] for slot, it in begun.items()} for n in range(2)]
    cuts = [halves(it, shape, axis) for it in (value, *gradients)]
    kind = type(optimizer).__name__
    before = torch.get_rng_state()
    try:
        whole = run(optimizer, group, [(value, gradients)], begun)[0].value
        parts = [run(optimizer, group, [(cuts[0][n], [it[n] for it in cuts[1:]])], own[n])[0].value for n in range(2)]
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


def halves(value: Any, shape: tuple[int, ...], axis: int) -> Sequence[Any]:
    """Along an axis; of what has no value for each element of the parameter, two that are equal."""
    return value.chunk(2, axis) if is_whole(value, shape) else (value, value)


def even(slot: Any, parameter: Tensor, shape: tuple[int, ...]) -> Any:
    """A slot as a parameter of another shape would have it, from its first value."""
    if not is_whole(slot, tuple(parameter.shape)):
        return slot
    return torch.full(shape, float(slot.flatten()[0]), dtype=slot.dtype)


def run(
    optimizer: Optimizer, group: Group, tensors: Sequence[tuple[Tensor, list[Tensor]]], begun: Slots
) -> list[Trial]:
    """A few steps of a copy of the optimizer, on each tensor with the same slots to begin with."""
    torch.manual_seed(0)
    parameters = [Parameter(value.clone()) for value, _ in tensors]
    stand_in = copy_of(optimizer, group, parameters, begun)
    for step in range(STEPS):
        for parameter, (_, gradients) in zip(parameters, tensors, strict=True):
            gradient = gradients[step].clone()
            parameter.grad = gradient.to_sparse(1) if isinstance(optimizer, SparseAdam) else gradient
        type(optimizer).step(stand_in)
    return [Trial(parameter.detach(), dict(stand_in.state.get(parameter, {}))) for parameter in parameters]


def copy_of(optimizer: Optimizer, group: Group, parameters: list[Parameter], begun: Slots) -> Optimizer:
    """An optimizer of the same settings that has other parameters, and calls no hooks."""
    stand_in: Optimizer = object.__new__(type(optimizer))
    own = {
        name: OrderedDict() if name.startswith("_optimizer_") else value  # hooks
        for name, value in vars(optimizer).items()
        if name not in ("param_groups", "state", "step")  # as a scheduler wraps it
    }
    settings = {key: copy.deepcopy(value) for key, value in group.items() if key not in ("params", "param_names")}
    if "lr" in settings and not float(settings["lr"]):
        settings["lr"] = settings["lr"] + rate_of(group)
    stand_in.__dict__.update(copy.deepcopy(own, {id(optimizer): stand_in}))
    state: defaultdict[Tensor, Slots] = defaultdict(dict)
    if begun:
        state.update({parameter: copy.deepcopy(begun) for parameter in parameters})
    stand_in.__dict__.update(param_groups=[settings | {"params": parameters}], state=state)
    return stand_in


def rate_of(group: Group) -> float:
    """A learning rate with which something happens."""
    return float(group.get("lr", 1.0)) or LEAST_RATE


def cut(values: Tried, part: slice) -> Tried:
    """Rows of a tensor and of its gradients; a number stays as it is."""
    value, gradients = values
    return (value[part], [each[part] for each in gradients]) if value.ndim else values


def cut_slots(slots: Slots, shape: tuple[int, ...], part: slice) -> Slots:
    """The slots of these rows."""
    return {name: slot[part] if shape and is_whole(slot, shape) else slot for name, slot in slots.items()}


def corner(slot: Any, shape: tuple[int, ...], small_shape: tuple[int, ...]) -> Any:
    """Of a slot of the parameter's shape as much as fits a small one."""
    return slot[tuple(map(slice, small_shape))] if is_whole(slot, shape) else slot


def is_whole(slot: Any, shape: tuple[int, ...]) -> bool:
    """Whether a slot has a value for each element of its parameter."""
    return isinstance(slot, Tensor) and tuple(slot.shape) == shape


def fits(whole: Trial, parts: Sequence[Trial], common: frozenset[str], most: float = 0.0, update: float = 0.0) -> bool:
    """Whether rows that were updated apart are, with their slots, what the whole tensor is: bit for bit, or nearly.

    Args:
        whole: what became of the tensor.
        parts: of its rows.
        common: slots that are not cut with the rows.
        most: how far they may be apart: values in parts of the update, slots of their largest value.
        update: by how much the tensor has changed.
    """
    if any(part.slots.keys() != whole.slots.keys() for part in parts):
        return False
    if not distance(whole.value, torch.cat([part.value for part in parts])) <= most * update:
        return False
    for name, slot in whole.slots.items():
        own = [part.slots[name] for part in parts]
        if name in common and not all(equal(slot, each) for each in own):
            return False
        if name not in common:
            shapes_fit = all(is_whole(one, tuple(part.value.shape)) for one, part in zip(own, parts, strict=True))
            if not (shapes_fit and distance(slot, torch.cat(own)) <= most * float(slot.abs().max())):
                return False
    return True


def distance(one: Tensor, other: Tensor) -> float:
    """Largest difference."""
    return float((one.double() - other.double()).abs().max())


def equal_slots(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Bit for bit."""
    return one.keys() == other.keys() and all(equal(value, other[name]) for name, value in one.items())


def equal(one: Any, other: Any) -> bool:
    """Bit for bit."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)
