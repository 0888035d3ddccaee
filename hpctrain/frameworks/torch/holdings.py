"""State that a torch task keeps outside of its model: in its optimizer, and what that wraps, and in its loss."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Module
from torch.optim import SGD, Optimizer

from hpctrain.errors import UserError
from hpctrain.frameworks.torch.optimizer import Part
from hpctrain.frameworks.torch.state import TorchTensor, digest, load_tensors, module_tensors, tensor_of
from hpctrain.train.reach import Place, Reach, is_own, own_attributes, plain_key
from hpctrain.train.state import ArrayTensor, Placement, StateTensor
from hpctrain.train.tree import put_together, take_apart

PLAIN_MODULE = frozenset(vars(Module())) - {"_modules"}
"""Attributes that torch itself gives every module."""
PLAIN_OPTIMIZER = frozenset(vars(SGD([torch.zeros(1)], lr=1.0)))
"""The same for optimizers."""
MOST_BYTES = 64 << 20
"""Of a tensor or array in a plain attribute that is looked at: a larger one is data."""
OWN = "own"
"""Part of the names of what is kept in plain attributes."""


@runtime_checkable
class Speaker(Protocol):
    """An object that says itself what its state is."""

    def state_dict(self) -> Any:
        """All of it."""

    def load_state_dict(self, state: Any) -> Any:
        """Takes over what ``state_dict`` gave."""


def speaks(value: Any) -> bool:
    """Whether an object other than a module has methods of its own that save and load its state."""
    if isinstance(value, Optimizer):
        kind = type(value)
        return kind.state_dict is not Optimizer.state_dict and kind.load_state_dict is not Optimizer.load_state_dict
    return isinstance(value, Speaker) and not isinstance(value, (Module, type))


def attributes(value: Any) -> Iterable[str]:
    """What is gone into: of optimizers and modules all that is not torch's own."""
    if isinstance(value, Optimizer):
        return [name for name in vars(value) if name not in PLAIN_OPTIMIZER]
    if isinstance(value, Module):
        return [name for name in vars(value) if name not in PLAIN_MODULE] if is_own(value) else ["_modules"]
    return own_attributes(value)


@dataclass(frozen=True)
class Root:
    """An object of a task, besides the model, that may hold state."""

    name: str
    value: Any
    placement: Placement
    """Of its state, but for the parameters of modules, which are equal on all ranks."""
    is_strict: bool = False
    """Whether numbers and tensors that appear while it works are refused; else they are taken for caches and logs."""


@dataclass
class Found:
    """What a root holds, by path."""

    modules: dict[str, Module]
    speakers: dict[str, Any]
    loose: dict[str, Place]
    """Numbers, arrays and tensors in plain attributes."""


class Holdings:
    """State that a task keeps outside of its model and of the ``state`` of its optimizers.

    - Modules: their parameters and buffers.
    - Objects with ``state_dict`` and ``load_state_dict``, and the extra state of modules: what these give.
    - Numbers, arrays and tensors in plain attributes that were there from the start and have changed since.

    Args:
        optimizer: the task's; equal on all ranks.
        others: what sees each rank's own samples, by name: the loss, ``forward``.
        model: its own tensors are not looked at, its extra state is.

    Raises:
        UserError: the extra state of a module cannot be put back.
    """

    def __init__(self, optimizer: Any, others: Mapping[str, Any], model: Module) -> None:
        own = [Root(name, value, Placement.RANK) for name, value in others.items()]
        self.roots = [Root("optimizer", optimizer, Placement.REPLICATED, is_strict=True), *own]
        self.model = model
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.modules = {id(module) for module in model.modules()}
        self.reach = Reach(self._is_end, attributes, self._key_name)
        self.extra_state = extra_states("model", "", model)
        self.made_with: dict[str, str] = {}
        self.moving: set[str] = set()
        self.late: dict[str, str] = {}
        self.looked_after = 0
        for root in self.roots:
            found = self.find(root)
            self.made_with |= {loose_name(root, path): sign(place.value) for path, place in found.loose.items()}
            for path, module in found.modules.items():
                self.extra_state += extra_states(root.name, path, module)

    def parts(self) -> list[Part]:
        """All optimizers in the task's optimizer, itself included, inner ones first."""
        reach = Reach(lambda value: self._is_end(value) and not speaks(value), attributes, self._key_name)
        places = list(reach.places(self.roots[0].value))
        speaking = [place.path for place in places if speaks(place.value)]
        return [
            Part(place.path, place.value, any(not path or f"{place.path}.".startswith(f"{path}.") for path in speaking))
            for place in reversed(places)
            if isinstance(place.value, Optimizer)
        ]

    def find(self, root: Root) -> Found:
        """What a root holds now."""
        found = Found({}, {}, {})
        inner = set(self.modules)
        for place in self.reach.places(root.value):
            if isinstance(place.value, Module):
                if id(place.value) not in inner:
                    inner |= {id(module) for module in place.value.modules()}
                    found.modules[place.path] = place.value
            elif speaks(place.value):
                found.speakers[place.path] = place.value
            elif is_loose(place.value):
                found.loose[place.path] = place
        return found

    def tensors(self, known: Iterable[Tensor], updates: int) -> list[StateTensor]:
        """``held/<root>/<kind>/<path>``.

        Args:
            known: tensors that are saved by other names; their memory is not looked at again.
            updates: how many there have been since the task was made.

        Raises:
            UserError: there is state that could not be put back.
        """
        memory = {tensor.data_ptr() for tensor in (*self.model.parameters(), *self.model.buffers(), *known)}
        tensors: list[StateTensor] = []
        late: dict[str, str] = {}
        for root in self.roots:
            found = self.find(root)
            held = [tensor for tensor in module_state(root, found) if tensor.tensor.data_ptr() not in memory]
            memory |= {tensor.tensor.data_ptr() for tensor in held}
            tensors += [*held, *speaker_state(root, found)]
            for path, place in found.loose.items():
                name, now = loose_name(root, path), sign(place.value)
                if isinstance(place.value, Tensor) and place.value.data_ptr() in memory:
                    continue
                if name not in self.made_with:
                    late |= {name: now} if root.is_strict else {}
                elif name in self.moving or now != self.made_with[name] or is_shared(root, place):
                    self.moving.add(name)
                    tensors.append(loose_tensor(root, name, place))
        self._refuse_late(late, updates)
        return tensors + extra_tensors(self.extra_state)

    def _refuse_late(self, late: dict[str, str], updates: int) -> None:
        """Raises UserError where what was not there from the start is not there once and for all either."""
        if self.looked_after and updates > self.looked_after:
            changed = [name for name, now in late.items() if self.late.get(name) != now]
            if changed:
                path = changed[0].rpartition("/")[2]
                raise UserError(
                    f"{type(self.roots[0].value).__name__} keeps {path} outside of its state, where it cannot be saved",
                    "keep it in optimizer.state or in the groups, make it in the constructor, or give the optimizer a "
                    "state_dict and load_state_dict that hold it",
                )
        self.late, self.looked_after = late, updates

    def snapshot(self) -> dict[str, NDArray[Any]]:
        """Copies, for ``load``, of all that forward passes may change, whether they have or not."""
        tensors = extra_tensors(self.extra_state)
        for root in self.roots[1:]:
            found = self.find(root)
            tensors += [*module_state(root, found), *speaker_state(root, found)]
            places = ((path, place) for path, place in found.loose.items() if can_put(place))
            tensors += [loose_tensor(root, loose_name(root, path), place) for path, place in places]
        return {tensor.name: value_of(tensor) for tensor in tensors}

    def load(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Takes over what is there by name; what is missing stays as it is.

        Raises:
            UserError: something was saved for which there is no place, or which does not fit.
        """
        taken: set[str] = set()
        device = next(self.model.parameters()).device
        for root in self.roots:
            found = self.find(root)
            held = [tensor for tensor in module_state(root, found) if tensor.name in arrays]
            load_tensors(held, arrays)
            taken |= {tensor.name for tensor in held}
            for path, speaker in found.speakers.items():
                if tree := below(speaker_name(root, path), arrays, taken):
                    speaker.load_state_dict(tree_value(tree, type(speaker).__name__, device))
            for path, place in found.loose.items():
                if (name := loose_name(root, path)) in arrays:
                    put_back(place, arrays[name], f"{root.name}, {path}")
                    self.moving.add(name)
                    taken.add(name)
        for name, module in self.extra_state:
            if tree := below(name, arrays, taken):
                module.set_extra_state(tree_value(tree, type(module).__name__, device))
        left = {name for name in arrays if name.startswith("held/")} - taken
        if left:
            fix = "load it into the task that it was saved from"
            raise UserError(f"{min(left)} was saved, and the task has no place for it", fix)

    def _is_end(self, value: Any) -> bool:
        return isinstance(value, (Tensor, np.ndarray)) or id(value) in self.modules or speaks(value)

    def _key_name(self, key: Any) -> str | None:
        """Parameters, and their ids, by their names; else strings and numbers."""
        name = self.names.get(key) if type(key) is int else self.names.get(id(key))
        return name or plain_key(key)


def module_state(root: Root, found: Found) -> list[TorchTensor]:
    """Parameters and buffers of the modules that a root holds, as far as they are in their ``state_dict``."""
    return [
        TorchTensor(f"held/{root.name}/module/{path}{'.' if path else ''}{name}", tensor, placement)
        for path, module in found.modules.items()
        for name, tensor, placement in module_tensors(module)
    ]


def speaker_state(root: Root, found: Found) -> list[StateTensor]:
    """What objects say their state is."""
    return [
        tensor
        for path, speaker in found.speakers.items()
        for tensor in tree_tensors(
            speaker_name(root, path), speaker.state_dict(), root.placement, f"the state of {type(speaker).__name__}"
        )
    ]


def speaker_name(root: Root, path: str) -> str:
    """Names of what an object says begin so."""
    return f"held/{root.name}/dict/{path or 'itself'}"


def extra_states(root: str, path: str, module: Module) -> list[tuple[str, Module]]:
    """Modules within one that say themselves what else their state is, by the names of that. Raises UserError."""
    found = [
        (".".join(filter(None, (path, name))) or "itself", each)
        for name, each in module.named_modules()
        if type(each).get_extra_state is not Module.get_extra_state
    ]
    mute = [type(each).__name__ for _, each in found if type(each).set_extra_state is Module.set_extra_state]
    if mute:
        raise UserError(
            f"{mute[0]} has get_extra_state and no set_extra_state, so that its state could not be put back",
            "give it both",
        )
    return [(f"held/{root}/extra/{name}", each) for name, each in found]


def extra_tensors(modules: Iterable[tuple[str, Module]]) -> list[StateTensor]:
    """The extra state of modules."""
    return [
        tensor
        for name, module in modules
        for tensor in tree_tensors(
            name, module.get_extra_state(), Placement.RANK, f"the extra state of {type(module).__name__}"
        )
    ]


def tree_tensors(name: str, value: Any, placement: Placement, what: str) -> list[StateTensor]:
    """A nested value as named tensors. Raises UserError where it holds what cannot be saved."""
    tree = take_apart(value, leaf_kind, what)
    tensors: list[StateTensor] = [
        ArrayTensor(f"{name}/{key}", array, placement) for key, array in tree.arrays().items()
    ]
    for number, leaf in enumerate(tree.leaves):
        own = f"{name}/{number}"
        tensors.append(
            TorchTensor(own, leaf, placement)
            if isinstance(leaf, Tensor)
            else ArrayTensor(own, np.array(leaf), placement)
        )
    return tensors


def leaf_kind(value: Any) -> str | None:
    """What a leaf was."""
    if isinstance(value, Tensor):
        return "host" if value.device.type == "cpu" else "device"
    return "array" if isinstance(value, np.ndarray) else None


def tree_value(arrays: Mapping[str, NDArray[Any]], what: str, device: torch.device) -> Any:
    """What ``tree_tensors`` took apart."""

    def leaf(name: str, kind: Any) -> Any:
        if kind == "array":
            return np.array(arrays[name])
        return tensor_of(arrays[name]).to(device if kind == "device" else "cpu")

    return put_together(arrays, leaf, f"the state of {what}")


def below(name: str, arrays: Mapping[str, NDArray[Any]], taken: set[str]) -> dict[str, NDArray[Any]]:
    """Arrays whose names begin with a name, without it; notes them as taken."""
    found = {full: array for full, array in arrays.items() if full.startswith(f"{name}/")}
    taken.update(found)
    return {full.removeprefix(f"{name}/"): array for full, array in found.items()}


def is_loose(value: Any) -> bool:
    """Whether a value in a plain attribute is one that may be state."""
    if isinstance(value, Tensor):
        return value.layout is torch.strided and value.device.type != "meta" and value.nbytes <= MOST_BYTES
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "biufc" and value.nbytes <= MOST_BYTES
    return isinstance(value, (bool, int, float))


def loose_name(root: Root, path: str) -> str:
    """Name of what is kept in a plain attribute."""
    return f"held/{root.name}/own/{path}"


def loose_tensor(root: Root, name: str, place: Place) -> StateTensor:
    """Raises UserError where it could not be put back."""
    if not can_put(place):
        raise UserError(
            f"the task's {root.name} keeps {place.path}, which changes, where it cannot be put back",
            "keep it in an attribute, a list or a dict rather than in a tuple",
        )
    placement = Placement.REPLICATED if is_shared(root, place) else Placement.RANK
    if isinstance(place.value, Tensor):
        return TorchTensor(name, place.value, placement)
    return ArrayTensor(name, np.array(place.value), placement)


def is_shared(root: Root, place: Place) -> bool:
    """Whether a value in a plain attribute is split over the ranks that write; these must then all list it."""
    return root.placement is Placement.REPLICATED and isinstance(place.value, (Tensor, np.ndarray))


def can_put(place: Place) -> bool:
    """Whether another value can take a value's place, or be copied into it."""
    return place.put is not None or isinstance(place.value, Tensor)


def sign(value: Any) -> str:
    """Changes when a number, array or tensor does."""
    if isinstance(value, Tensor):
        return digest([value])
    return hashlib.sha256(value.tobytes()).hexdigest() if isinstance(value, np.ndarray) else repr(value)


def put_back(place: Place, saved: NDArray[Any], what: str) -> None:
    """Puts a saved value where it was. Raises UserError where it does not fit."""
    value = place.value
    if isinstance(value, Tensor) and value.shape == saved.shape:
        TorchTensor(what, value).assign(saved)
    elif place.put is None or (saved.ndim and not isinstance(value, (Tensor, np.ndarray))):
        raise UserError(f"what was saved of {what} does not fit", "load it into the task that it was saved from")
    elif isinstance(value, Tensor):
        place.put(tensor_of(saved).to(value.device))
    else:
        place.put(np.array(saved) if isinstance(value, np.ndarray) else type(value)(saved))


def value_of(tensor: StateTensor) -> NDArray[Any]:
    """A copy."""
    out = np.empty(tensor.shape, "uint16" if tensor.dtype == "bfloat16" else tensor.dtype)
    tensor.copy_into(out)
    return out
