"""Finds out, by trying a task's optimizers, how its parameters may be partitioned."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer, SparseAdam

from hpctrain.backends.torch.state.optimizer import Part, Together
from hpctrain.backends.torch.state.tensors import load_random, random_tensors
from hpctrain.backends.torch.task.holdings import Holdings
from hpctrain.backends.torch.task.shares import Share
from hpctrain.comm.group import Group
from hpctrain.errors import UserError
from hpctrain.parallel.sharded import LEAST_RATE, STEPS, RowRange, small, uneven_rows


@dataclass(frozen=True)
class ParameterTraits:
    """How the parameters of all optimizers may be sharded."""

    traits: Mapping[int, OptimizerTraits] = field(default_factory=dict)
    """Traits by the id of each parameter that is updated."""
    coupled: str | None = None
    """Type of an optimizer that couples the updates of different parameters, if any."""

    @property
    def common(self) -> frozenset[str]:
        """Names of slots that are not split by rows."""
        return frozenset[str]().union(*(one.common for one in self.traits.values()))

    def cuttable(self, shares: Mapping[str, Share], groups: Sequence[Group], nearly: bool = False) -> set[int]:
        """Ids of parameters that may be split by rows, according to all ranks of the groups. Collective.

        Args:
            shares: parameters by optimizer.
            groups: groups that have to agree, one after the other.
            nearly: whether results may differ by rounding; otherwise they must match bitwise.
        """
        wanting = [id(parameter) for share in shares.values() for _, parameter in share.pairs]
        traits = [self.traits.get(one, OptimizerTraits(is_alone=True)) for one in wanting]
        found = [one.nearly_by_rows if nearly else one.by_rows for one in traits]
        for group in groups:
            everywhere = group.allgather(found, "compare how optimizer state can be split")
            found = [all(of_ranks) for of_ranks in zip(*everywhere, strict=True)]
        return {one for one, may_be in zip(wanting, found, strict=True) if may_be}


def plain(parts: Sequence[Part]) -> list[Optimizer]:
    """Optimizers that update parameters themselves."""
    return [part.optimizer for part in parts if type(part.optimizer) is not Together]


def unsuited(parts: Sequence[Part], holdings: Holdings) -> str | None:
    """Type of an optimizer that contains others, or keeps state outside ``state`` and ``param_groups``, if any."""
    for part in parts:
        inner = [other for other in parts if other is not part and other.path.startswith(part.prefix)]
        if part.saves_itself or (inner and type(part.optimizer) is not Together):
            return type(part.optimizer).__name__
    found = holdings.find(holdings.roots[0])
    if found.modules or found.stateful or any(isinstance(one, (Tensor, np.ndarray)) for one in found.loose.values()):
        return type(parts[-1].optimizer).__name__
    return None


def try_optimizers(parts: Sequence[Part], device: torch.device) -> ParameterTraits:
    """Tries all optimizers, on a small tensor for each shape and dtype of their parameters. Restores random states.

    Raises UserError if one cannot be tried.
    """
    random = {tensor.name: np.array(tensor.array) for tensor in random_tensors(device)}
    traits: dict[int, OptimizerTraits] = {}
    coupled = None
    try:
        for optimizer in plain(parts):
            for group in optimizer.param_groups:
                known: dict[object, OptimizerTraits] = {}
                for parameter in (one for one in group["params"] if one.requires_grad and one.numel()):
                    kind = small(tuple(parameter.shape)), parameter.dtype
                    if kind not in known:
                        known[kind] = try_optimizer(optimizer, group, parameter)
                    traits[id(parameter)] = known[kind]
                    coupled = coupled if known[kind].is_alone else type(optimizer).__name__
    finally:
        load_random(device, random)
    return ParameterTraits(traits, coupled)


@dataclass(frozen=True)
class OwnRows:
    """Rows of a parameter that this rank updates."""

    piece: RowRange
    parameter: Parameter
    """A view of these rows, which the optimizer has in place of the whole parameter."""


def parameter_of(whole: Parameter, piece: RowRange) -> Parameter:
    """A parameter that shares the memory of these rows of another one, and has its attributes."""
    part = Parameter(piece.of(whole.data))
    part.__dict__.update(vars(whole))
    return part


def replace_parameters(
    optimizer: Optimizer, group: dict[str, object], mine: Mapping[int, OwnRows | None], common: frozenset[str]
) -> None:
    """Replaces an optimizer's whole parameters by this rank's rows, together with existing state."""
    wholes = group["params"]
    assert isinstance(wholes, list), "of an optimizer"
    kept: list[tuple[int, Tensor]] = []
    for index, whole in enumerate(wholes):
        rows = mine.get(id(whole))
        if id(whole) not in mine:  # it requires no gradient
            kept.append((index, whole))
            continue
        slots = optimizer.state.pop(whole, None)
        if rows is not None:
            kept.append((index, rows.parameter))
            if slots:
                optimizer.state[rows.parameter] = {
                    name: own_rows(slot, whole, rows) if name not in common else slot for name, slot in slots.items()
                }
    if isinstance(labels := group.get("param_names"), list):
        group["param_names"] = [labels[index] for index, _ in kept]
    group["params"] = [parameter for _, parameter in kept]


def refuse_late(optimizers: Sequence[Optimizer], is_late: Callable[[Tensor], bool], names: Mapping[int, str]) -> None:
    """Raises UserError if an optimizer was given a parameter after its parameters had been sharded.

    Args:
        optimizers: all optimizers of the task.
        is_late: whether a parameter is not one of this rank's rows.
        names: names of whole parameters, by id.
    """
    held = (one for each in optimizers for group in each.param_groups for one in group["params"])
    if (found := next(filter(is_late, held), None)) is not None:
        raise UserError(
            f"an optimizer was given {names.get(id(found), 'a parameter')} after the run had begun, when "
            "parallel.shard had sharded its parameters",
            "give it all parameters when the task is made (a schedule with a factor for each group lets some wait), "
            "or leave parallel.shard out",
        )


def own_rows(slot: object, whole: Parameter, rows: OwnRows) -> object:
    """This rank's rows of a slot with the shape of the parameter; other slots unchanged."""
    if isinstance(slot, Tensor) and is_whole(slot, tuple(whole.shape)):
        return rows.piece.of(slot).clone(memory_format=torch.preserve_format)
    return slot


HALVED_SIZE = 6
"""Length of each axis of a tensor that is tried in halves."""
ROUNDED = {torch.float32: 1e-4, torch.float64: 1e-12}
"""Fraction of an update that rounding may change. Optimizers that use whole tensors change more than a hundredth."""
Settings = dict[str, Any]
"""A parameter group."""
Slots = dict[str, Any]
Tried = tuple[Tensor, list[Tensor]]
"""A value, and the gradient for each step."""


@dataclass(frozen=True)
class OptimizerTraits:
    """How a parameter may be partitioned over ranks."""

    is_alone: bool
    """Whether its update is independent of other parameters; otherwise it cannot be partitioned at all."""
    by_rows: bool = False
    """Whether updating its rows separately gives bitwise the same result."""
    nearly_by_rows: bool = False
    """The same up to rounding: kernels may treat the end of a tensor differently from its middle."""
    common: frozenset[str] = frozenset()
    """Slots that are not split by rows, such as a step count."""


@dataclass(frozen=True)
class Trial:
    """A tensor and its slots after a few steps."""

    value: Tensor
    slots: Slots


def try_optimizer(optimizer: Optimizer, group: Settings, parameter: Parameter) -> OptimizerTraits:
    """Updates a small tensor of a parameter's kind alone, together with another one, and split into rows.

    Changes global random states, but nothing in the optimizer.

    Args:
        optimizer: as the task created it.
        group: one of its parameter groups.
        parameter: a parameter of that group.

    Raises:
        UserError: the optimizer does not update the parameters in its groups, or fails.
    """
    state = optimizer.state.get(parameter, {})
    shape = small(tuple(parameter.shape))
    random = torch.Generator().manual_seed(1)

    device = torch.device("cpu") if parameter.is_meta else parameter.device

    def drawn(scale: float) -> Tensor:
        return (scale * torch.randn(shape, generator=random)).to(device, parameter.dtype)

    scale = min(1.0, 10 * rate_of(group))  # small enough for updates to be visible in 16 bits
    values, other = [(drawn(times * scale), [drawn(times) for _ in range(STEPS)]) for times in (1.0, 3.0)]
    begun = {name: corner(value, tuple(parameter.shape), shape) for name, value in state.items()}
    try:
        alone = run(optimizer, group, [values], begun)
        together = run(optimizer, group, [values, other], begun)
        rows = uneven_rows(shape)
        parts = [run(optimizer, group, [cut(values, part)], cut_slots(begun, shape, part)) for part in rows]
    except Exception as error:
        raise UserError(
            f"{type(optimizer).__name__} fails on a small copy of its parameters, on which it is tried before its "
            f"state is sharded: {type(error).__name__}: {error}",
            "use an optimizer that updates what is in its param_groups, or leave parallel.shard out",
        ) from error
    if torch.equal(alone.value, values[0]):
        raise UserError(
            f"{type(optimizer).__name__} does not update what is in its param_groups, so its state cannot be sharded",
            "use an optimizer whose step goes through its param_groups, or leave parallel.shard out",
        )
    common = frozenset(name for name, slot in alone.slots.items() if not is_whole(slot, shape))
    is_alone = torch.equal(alone.value, together.value) and equal_slots(alone.slots, together.slots)
    by_rows = len(rows) > 1 and fits(alone, parts, common)
    most, update = ROUNDED.get(parameter.dtype, 0.0), distance(alone.value, values[0])
    nearly = by_rows or (len(rows) > 1 and fits(alone, parts, common, most, update))
    return OptimizerTraits(is_alone, by_rows, nearly, common)


def require_elementwise(optimizer: Optimizer, parameter: Tensor, name: str, axis: int) -> None:
    """Raises UserError unless updating halves of a tensor gives bitwise the same result as updating the whole.

    Args:
        optimizer: a copy of it is tried; it is not changed itself.
        parameter: the whole parameter to split; need not belong to the optimizer.
        name: name of the parameter.
        axis: axis along which to split it.
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
        whole = run(optimizer, group, [(value, gradients)], begun).value
        parts = [run(optimizer, group, [(cuts[0][n], [it[n] for it in cuts[1:]])], own[n]).value for n in range(2)]
    except Exception as error:
        raise UserError(
            f"{kind} cannot be tried on a small copy of {name}, which is split: {type(error).__name__}: {error}",
            "use an optimizer that updates what is in its param_groups, such as AdamW, or leave the layer whole",
        ) from error
    finally:
        torch.set_rng_state(before)
    if not torch.equal(whole, torch.cat(parts, axis)):
        raise UserError(
            f"{kind} updates elements of {name} from other elements, and each rank has only a part of it",
            "use an optimizer that updates each element by itself, such as AdamW, or leave the layer whole",
        )


def halves(value: Any, shape: tuple[int, ...], axis: int) -> Sequence[Any]:
    """Halves along an axis; two references to a value that is not elementwise."""
    return value.chunk(2, axis) if is_whole(value, shape) else (value, value)


def even(slot: Any, parameter: Tensor, shape: tuple[int, ...]) -> Any:
    """A slot for another shape, filled with its first value; returned as it is if it is not elementwise."""
    if not is_whole(slot, tuple(parameter.shape)):
        return slot
    return torch.full(shape, float(slot.flatten()[0]), dtype=slot.dtype)


def run(optimizer: Optimizer, group: Settings, tensors: Sequence[tuple[Tensor, list[Tensor]]], begun: Slots) -> Trial:
    """Makes a few steps with a copy of the optimizer; all tensors start with the same slots. Returns the first one."""
    torch.manual_seed(0)
    parameters = [Parameter(value.clone()) for value, _ in tensors]
    stand_in = copy_of(optimizer, group, parameters, begun)
    for step in range(STEPS):
        for parameter, (_, gradients) in zip(parameters, tensors, strict=True):
            gradient = gradients[step].clone()
            parameter.grad = gradient.to_sparse(1) if isinstance(optimizer, SparseAdam) else gradient
        type(optimizer).step(stand_in)
    return Trial(parameters[0].detach(), dict(stand_in.state.get(parameters[0], {})))


def copy_of(optimizer: Optimizer, group: Settings, parameters: list[Parameter], begun: Slots) -> Optimizer:
    """A copy of an optimizer with other parameters and without hooks."""
    stand_in: Optimizer = object.__new__(type(optimizer))
    own = {
        name: OrderedDict() if name.startswith("_optimizer_") else value  # hooks
        for name, value in vars(optimizer).items()
        if name not in ("param_groups", "state", "step")  # ``step`` may be a scheduler's wrapper
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


def rate_of(group: Settings) -> float:
    """The group's learning rate, or a small one if that is 0."""
    return float(group.get("lr", 1.0)) or LEAST_RATE


def cut(values: Tried, part: slice) -> Tried:
    """Rows of a tensor and of its gradients; a scalar is returned as it is."""
    value, gradients = values
    return (value[part], [each[part] for each in gradients]) if value.ndim else values


def cut_slots(slots: Slots, shape: tuple[int, ...], part: slice) -> Slots:
    """The slots of these rows."""
    return {name: slot[part] if shape and is_whole(slot, shape) else slot for name, slot in slots.items()}


def corner(slot: Any, shape: tuple[int, ...], small_shape: tuple[int, ...]) -> Any:
    """The first values of an elementwise slot, with a smaller shape; other slots as they are."""
    return slot[tuple(map(slice, small_shape))] if is_whole(slot, shape) else slot


def is_whole(slot: Any, shape: tuple[int, ...]) -> bool:
    """Whether a slot is elementwise: a tensor with the parameter's shape."""
    return isinstance(slot, Tensor) and tuple(slot.shape) == shape


def fits(whole: Trial, parts: Sequence[Trial], common: frozenset[str], most: float = 0.0, update: float = 0.0) -> bool:
    """Whether separately updated rows and their slots match those of the whole tensor: bitwise, or within a tolerance.

    Args:
        whole: result for the whole tensor.
        parts: results for its rows.
        common: slots that are not split by rows.
        most: tolerance, relative to the update for values, and to the largest magnitude for slots.
        update: largest change of the tensor.
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
    """Largest absolute difference."""
    return float((one.double() - other.double()).abs().max())


def equal_slots(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether slots are equal bitwise."""
    return one.keys() == other.keys() and all(equal(value, other[name]) for name, value in one.items())


def equal(one: Any, other: Any) -> bool:
    """Whether values are equal bitwise."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)
