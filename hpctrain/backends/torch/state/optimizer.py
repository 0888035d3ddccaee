"""State of a torch task's optimizers as named tensors, and their learning rates."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from hpctrain.backends.named_state import load_tensors
from hpctrain.backends.torch.state.tensors import NUMBER, TorchTensor, tensor_of, tensors_of
from hpctrain.backends.torch.strategies.partition import Slices
from hpctrain.errors import UserError, kind_of
from hpctrain.system.array_types import Array
from hpctrain.train.saved_arrays import SavedArrays, as_saved
from hpctrain.train.schedule import Factors, OwnRates
from hpctrain.train.state import ArrayTensor, Cut, Placement, StateTensor

Group = dict[str, Any]


class Together(Optimizer):
    """Several optimizers for the same loss, combined into one.

    Args:
        each: the optimizers, which must update disjoint sets of parameters.
    """

    each: tuple[Optimizer, ...] = ()

    def __init__(self, each: Sequence[Optimizer]) -> None:
        super().__init__([group for one in each for group in one.param_groups], common([one.defaults for one in each]))
        self.each = tuple(each)

    @property
    def param_groups(self) -> list[Group]:
        """All current groups: an optimizer replaces its groups when it loads its state."""
        return [group for one in self.each for group in one.param_groups]

    @param_groups.setter
    def param_groups(self, groups: list[Group]) -> None:
        """Ignored: the groups are those of the optimizers."""

    def __getstate__(self) -> dict[str, Any]:
        """State for copying, including the optimizers."""
        known = super().__getstate__()
        return {"defaults": known["defaults"], "state": known["state"], "each": self.each}

    def step(self, closure: Any = None) -> Any:
        """Steps each optimizer."""
        for one in self.each:
            one.step()


def common(defaults: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Settings that all optimizers have: schedulers look there for a momentum."""
    first, *others = defaults
    return {key: value for key, value in first.items() if all(key in other for other in others)}


def joined(optimizer: Any) -> Any:
    """Combines lists of optimizers, in a task's optimizer or in a dict of optimizers by name.

    Raises:
        UserError: a list is empty, holds something else, or holds two optimizers of the same parameter.
    """
    if isinstance(optimizer, Mapping):
        return {name: joined(one) for name, one in optimizer.items()}
    if isinstance(optimizer, Iterator):
        what = f"optimizer of the task is {kind_of(optimizer)}, which can be read only once"
        raise UserError(what, "give a list of objects: optimizer=[SparseAdam(...), Adam(...)]")
    if not isinstance(optimizer, (list, tuple)):
        return optimizer
    wrong = [type(one).__name__ for one in optimizer if not isinstance(one, Optimizer)]
    if wrong or not optimizer:
        problem = f"holds {wrong[0]}, which is not a torch.optim.Optimizer" if wrong else "is an empty list"
        raise UserError(f"optimizer of the task {problem}", "give a list of objects: [SparseAdam(...), Adam(...)]")
    own = [{id(one) for group in each.param_groups for one in group["params"]} for each in optimizer]
    if sum(map(len, own)) > len(set().union(*own)):
        problem = "some parameters appear in more than one"
        raise UserError(f"the optimizers of the task cannot be combined: {problem}", "give each parameter to one")
    return Together(optimizer)


@dataclass(frozen=True)
class OptimizerPart:
    """One of the optimizers in a task's optimizer."""

    path: str
    """Path within the task's optimizer; empty for that itself."""
    optimizer: Optimizer
    saves_itself: bool = False
    """Whether it, or an object that holds it, has a custom ``state_dict`` by which it is saved."""

    @property
    def prefix(self) -> str:
        """Prefix of the names of its slots."""
        return f"{self.path}." if self.path else ""


@dataclass(frozen=True)
class Slots:
    """Places optimizer state of partitioned parameters within that of whole ones."""

    slices: Mapping[int, Slices] = field(default_factory=dict)
    """Place of this rank's part in the whole parameter, by id of the part."""

    def slices_of(self, shape: tuple[int, ...], parameter: Tensor, is_saved: bool = False) -> Slices | None:
        """Place of a slot if it is cut like its parameter; None if it is not, such as a step count.

        Args:
            shape: shape of its value on this rank, or as saved.
            parameter: the parameter as the optimizer has it.
            is_saved: whether ``shape`` is the saved one.
        """
        slices = self.slices.get(id(parameter))
        if slices is None:
            return None
        return slices if shape == (slices.whole if is_saved else tuple(parameter.shape)) else None

    def placed(self, tensor: StateTensor, parameter: Tensor) -> Sequence[StateTensor]:
        """A slot as this rank saves it; empty if another rank saves it.

        Raises UserError if a slot of a partitioned parameter has another shape.
        """
        known = self.slices.get(id(parameter))
        if known is None:
            return [tensor]
        slices = self.slices_of(tensor.shape, parameter)
        if slices is not None and isinstance(tensor, TorchTensor):
            return tensors_of(tensor.name, tensor.value, slices)
        if known.is_cut and math.prod(tensor.shape) > 1:
            raise UserError(
                f"{tensor.name} has the shape {list(tensor.shape)}, unlike its parameter, which is partitioned",
                "use an optimizer whose state has the shape of the parameter, such as AdamW",
            )
        if known.rows is None:
            return [tensor]
        cut = Cut(tensor.shape, (0,) * len(tensor.shape), known.copy, known.copies)
        return [replace(tensor, placement=Placement.CUT, cut=cut)] if known.starts else []  # the first row's rank


class OptimizerState:
    """State of all optimizers. Inner ones come first, so that state that a wrapper shares has the inner one's name.

    Args:
        every: all optimizers, inner ones first.
        names: names of the model's parameters and of parts of them, by id.
        slots: places of state if optimizers have parts of parameters.
    """

    def __init__(self, every: Sequence[OptimizerPart], names: Mapping[int, str], slots: Slots) -> None:
        self.slots = slots
        self.every = every
        self.parts = [part for part in every if not part.saves_itself]
        self.names = names
        self.initial_rates = {place: float(group["lr"]) for place, group in self.rated_groups()}
        self.made_with = dict(self.group_numbers())
        self.rate_factors: Factors = 1.0
        """Last factors applied."""

    def rated_groups(self) -> Iterator[tuple[tuple[str, int], Group]]:
        """Groups with a learning rate, by optimizer and number; shared groups appear once for each optimizer."""
        for part in self.every:
            groups = enumerate(part.optimizer.param_groups)
            yield from (((part.path, index), group) for index, group in groups if "lr" in group)

    @property
    def learning_rate(self) -> float | None:
        """Current learning rate of the outermost optimizer's first group; None without one. May wait for a device."""
        groups = (group for part in reversed(self.every) for group in part.optimizer.param_groups)
        return next((float(group["lr"]) for group in groups if "lr" in group), None)

    def set_rates(self, factors: Factors) -> None:
        """Sets learning rates to the original ones times ``factors``; ``OwnRates`` leaves them unchanged.

        Raises UserError if the numbers of factors and parameter groups differ.
        """
        if factors == self.rate_factors or isinstance(factors, OwnRates):
            return
        self.rate_factors = factors
        groups = list(self.rated_groups())
        added = {place: float(group["lr"]) for place, group in groups if place not in self.initial_rates}
        self.initial_rates |= added  # by a hook
        outermost = {id(group): place for place, group in groups}
        for place, group in groups:
            rate = self.initial_rates[place] * self._factor_of(outermost[id(group)], factors)
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def _factor_of(self, place: tuple[str, int], factors: float | Sequence[float]) -> float:
        if not isinstance(factors, Sequence):
            return factors
        groups = max(index for path, index in self.initial_rates if path == place[0]) + 1
        if len(factors) != groups:
            raise UserError(
                f"the task's schedule gives {len(factors)} factors for the {groups} parameter groups of the optimizer",
                "return one number for all groups, or one for each of them, in their order",
            )
        return factors[place[1]]

    def group_numbers(self) -> Iterator[tuple[str, float]]:
        """Numbers in parameter groups except rates, by name: some optimizers keep counters or adapted values there."""
        for name, index, group in groups_of(self.parts):
            for key, value in group.items():
                if key != "lr" and isinstance(value, (bool, int, float)):
                    yield f"optimizer/{name}{NUMBER}/{index}/{key}", value

    def held(self) -> Iterator[tuple[OptimizerPart, Group, Tensor, dict[str, Any]]]:
        """(part, group, parameter, slots) of each parameter that has state, once."""
        seen: set[int] = set()
        states = [part.optimizer.state for part in self.parts]  # a wrapper may create it at each access
        for part, state in zip(self.parts, states, strict=True):
            for group in part.optimizer.param_groups:
                for parameter in group["params"]:
                    slots = state.get(parameter)
                    if slots and id(slots) not in seen:
                        seen.add(id(slots))
                        yield part, group, parameter, slots

    def tensors(self) -> list[StateTensor]:
        """State as ``optimizer/<slot>/<parameter>``; usually empty before the first update.

        Raises:
            UserError: an optimizer holds state that is neither a tensor nor a number, or that belongs to no parameter.
        """
        tensors: list[StateTensor] = []
        for part in self.parts:
            refuse_foreign_state(part.optimizer)
        for part, _, parameter, slots in self.held():
            own = self.names[id(parameter)]
            for slot, value in slots.items():
                name = f"optimizer/{part.prefix}{slot}"
                if isinstance(value, Tensor):
                    tensors += self.slots.placed(TorchTensor(f"{name}/{own}", value), parameter)
                elif isinstance(value, (bool, int, float)):
                    number = ArrayTensor(f"{name}{NUMBER}/{own}", np.array(value, np.float64))
                    tensors += self.slots.placed(number, parameter)
                elif value is not None:
                    raise UserError(
                        f"{type(part.optimizer).__name__} keeps {kind_of(value)} as {slot!r} of a parameter",
                        "use an optimizer whose state is tensors and numbers: others cannot be saved",
                    )
        changed = [(name, value) for name, value in self.group_numbers() if value != self.made_with.get(name)]
        tensors += [ArrayTensor(name, np.array(value)) for name, value in changed]
        for name, index, group in groups_of(self.parts):
            for key, value in group.items():
                if key != "lr" and isinstance(value, Tensor):
                    tensors.append(TorchTensor(f"optimizer/{name}/{index}/{key}", value))
        return tensors

    def load(self, arrays: Mapping[str, Array]) -> None:
        """Loads each parameter's state by name, on the parameter's device; learning rates are not loaded.

        State is put into the existing mappings, since optimizers may share them.
        """
        self.rate_factors = math.nan  # the run file's rates replace the saved ones
        found: dict[str, dict[str, str]] = {}
        for key in arrays:
            kind, _, rest = key.partition("/")
            slot, _, parameter_name = rest.partition("/")
            if kind == "optimizer":
                found.setdefault(parameter_name, {})[slot] = key
        states: list[Any] = []
        for part in self.parts:
            state = part.optimizer.state
            if not any(state is other for other in states):
                states.append(state)
                for group in part.optimizer.param_groups:
                    for parameter in group["params"]:
                        names = of_part(found.get(self.names[id(parameter)], {}), part, self.parts)
                        put_slots(state, group, parameter, names, as_saved(arrays), self.slots)
        for name, index, group in groups_of(self.parts):
            for full in arrays:
                kind, _, key = full.removeprefix(f"optimizer/{name}").rpartition("/")
                if kind == f"{NUMBER}/{index}":
                    group[key] = arrays[full].item()
                elif kind == f"/{index}":
                    device = group[key].device if key in group else group["params"][0].device
                    group[key] = tensor_of(arrays[full]).to(device)

    def to_device(self) -> None:
        """Moves state that exists from the start (Adagrad's) to the devices of its parameters."""
        for part in self.every:
            if part.saves_itself and part.optimizer.state:
                part.optimizer.load_state_dict(part.optimizer.state_dict())
        for _, group, parameter, slots in self.held():
            for slot, value in slots.items():
                if isinstance(value, Tensor):
                    slots[slot] = value.to(device_of(slot, group, parameter))


def groups_of(parts: Sequence[OptimizerPart]) -> Iterator[tuple[str, str, Group]]:
    """Each parameter group once, with the name prefix of its optimizer's groups and its number."""
    seen: set[int] = set()
    for part in parts:
        for index, group in enumerate(part.optimizer.param_groups):
            if id(group) not in seen:
                seen.add(id(group))
                yield f"{part.prefix}group", str(index), group


def refuse_foreign_state(optimizer: Optimizer) -> None:
    """Raises UserError if an optimizer keeps state that belongs to none of its parameters."""
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for key, value in optimizer.state.items():
        if id(key) not in own and not (isinstance(value, dict) and not value):
            raise UserError(
                f"{type(optimizer).__name__} keeps state under {str(key)[:50]!r}, which is not one of its parameters",
                "keep it in the parameters' state or groups, or give the optimizer a state_dict and load_state_dict",
            )


def of_part(slots: Mapping[str, str], part: OptimizerPart, parts: Sequence[OptimizerPart]) -> dict[str, str]:
    """Saved names of a parameter's slots that belong to one optimizer, by slot name."""
    inner = tuple(other.prefix for other in parts if len(other.prefix) > len(part.prefix))
    own = [name for name in slots if name.startswith(part.prefix) and not name.startswith(inner)]
    return {name.removeprefix(part.prefix): slots[name] for name in own}


def put_slots(
    state: Any, group: Group, parameter: Tensor, names: Mapping[str, str], saved: SavedArrays, slots: Slots
) -> None:
    """Replaces the state of a parameter by the saved values."""
    state.pop(parameter, None)
    if names:
        state[parameter] = {
            slot.removesuffix(NUMBER): slot_value(slot, name, saved, group, parameter, slots)
            for slot, name in names.items()
        }


def slot_value(
    slot: str, name: str, saved: SavedArrays, group: Group, parameter: Tensor, slots: Slots
) -> Tensor | float:
    """Loads a slot in the form in which the optimizer keeps it."""
    if slot.endswith(NUMBER):
        number = float(saved[name])
        return int(number) if number.is_integer() else number
    shape = saved.shape_of(name)
    dtype = tensor_of(np.empty(0, saved.dtype_of(name))).dtype
    device = device_of(slot, group, parameter)
    slices = slots.slices_of(shape, parameter, is_saved=True)
    is_like_parameter = slices is not None or shape == tuple(parameter.shape)
    if is_like_parameter:  # same memory format as the parameter, so that fused updates stay fast
        value = torch.empty_like(parameter, dtype=dtype, device=device, requires_grad=False)
    else:
        value = torch.empty(shape, dtype=dtype, device=device)
    load_tensors(tensors_of(name, value, slices), saved)
    return value


def device_of(slot: str, group: Group, parameter: Tensor) -> torch.device:
    """Device of a slot: its parameter's, except for step counts that torch keeps on the host."""
    on_host = slot == "step" and not (group.get("capturable") or group.get("fused"))
    return torch.device("cpu") if on_host else parameter.device
