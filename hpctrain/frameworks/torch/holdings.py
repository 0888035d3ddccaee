"""State that a torch task keeps outside its model: in its optimizer, and what that wraps, and in its loss."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Module
from torch.optim import SGD, Optimizer

from hpctrain.errors import UserError
from hpctrain.frameworks.named_state import load_tensors, plain_name, refuse_unplaced
from hpctrain.frameworks.torch.loose import MOST_BYTES, can_put, is_array, is_loose, loose_tensor, put_back, sign
from hpctrain.frameworks.torch.optimizer import Part
from hpctrain.frameworks.torch.spoken import (
    GENERATORS,
    Generator,
    below,
    extra_states,
    extra_tensors,
    speaks,
    tree_tensors,
    tree_value,
)
from hpctrain.frameworks.torch.state import TorchTensor, module_tensors
from hpctrain.train.reach import Place, Reach, own_attributes, plain_key
from hpctrain.train.seeds import derive
from hpctrain.train.state import Placement, StateTensor

PLAIN_MODULE = frozenset(vars(Module())) - {"_modules"}
"""Attributes that torch itself gives every module."""
PLAIN_OPTIMIZER = frozenset(vars(SGD([torch.zeros(1)], lr=1.0)))
"""The same for optimizers."""


def attributes(value: Any, own: bool) -> Iterable[str]:
    """What is gone into: of optimizers and modules all that is not torch's own."""
    if isinstance(value, Optimizer):
        return [name for name in vars(value) if name not in PLAIN_OPTIMIZER]
    if isinstance(value, Module):
        return [name for name in vars(value) if name not in PLAIN_MODULE] if own else ["_modules"]
    return own_attributes(value, own)


@dataclass(frozen=True)
class Root:
    """An object of a task, besides the model, that may hold state."""

    name: str
    value: Any
    is_shared: bool
    """Whether its state is equal on all ranks: the optimizer's. What sees each rank's own samples has its own state,
    except the parameters of modules; and values that appear while it works are taken for caches and logs there."""

    @property
    def placement(self) -> Placement:
        """Of what it holds."""
        return Placement.REPLICATED if self.is_shared else Placement.RANK

    def placement_of(self, place: Place) -> Placement:
        """Of a value in a plain attribute. Numbers cost nothing, and ranks need not agree on which have changed."""
        return self.placement if is_array(place) else Placement.RANK

    def is_listed(self, place: Place) -> bool:
        """Whether a value is saved even if it has not changed: ranks that share the writing must list the same."""
        return self.placement_of(place) is Placement.REPLICATED


@dataclass
class Found:
    """What a root holds, by path."""

    modules: dict[str, Module]
    speakers: dict[str, Any]
    """Generators among them."""
    loose: dict[str, Place]
    """Numbers, arrays and tensors in plain attributes."""


class Holdings:
    """State that a task keeps outside its model and the ``state`` of its optimizers.

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
        own = [Root(name, value, is_shared=False) for name, value in others.items()]
        self.roots = [Root("optimizer", optimizer, is_shared=True), *own]
        self.model = model
        self.names = {id(parameter): plain_name(name) for name, parameter in model.named_parameters()}
        self.modules = {id(module) for module in model.modules()}
        self.reach = Reach(self._is_end, attributes, self._key_name)
        self.extra_state = extra_states("model", "", model)
        self.made_with: dict[str, str] = {}
        self.moving: set[str] = set()
        self.late: dict[str, str] = {}
        self.looked_after = 0
        for root in self.roots:
            found = self.find(root)
            for path, place in found.loose.items():
                self.made_with[loose_name(root, path)] = "" if root.is_listed(place) else sign(place.value)
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
            elif isinstance(place.value, GENERATORS):
                found.speakers[place.path] = Generator(place.value)
            elif speaks(place.value):
                found.speakers[place.path] = place.value
            elif is_loose(place.value, math.inf if root.is_shared else MOST_BYTES):
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
                name = loose_name(root, path)
                if isinstance(place.value, Tensor) and place.value.data_ptr() in memory:
                    continue
                if name not in self.made_with:
                    late |= {name: sign(place.value)} if root.is_shared else {}
                elif name in self.moving or root.is_listed(place) or sign(place.value) != self.made_with[name]:
                    self.moving.add(name)
                    tensors.append(loose_tensor(name, place, root.placement_of(place)))
        self._refuse_late(late, updates)
        return tensors + extra_tensors(self.extra_state)

    def _refuse_late(self, late: dict[str, str], updates: int) -> None:
        """Raises UserError if what was not there from the start is not there once and for all either."""
        if self.looked_after and updates > self.looked_after:
            changed = [name for name, now in late.items() if self.late.get(name) != now]
            if changed:
                path = changed[0].rpartition("/")[2]
                raise UserError(
                    f"{optimizer_name(self.roots[0].value)} keeps {path} outside its state, where it cannot be saved",
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
            places = [(path, place) for path, place in found.loose.items() if can_put(place)]
            tensors += [loose_tensor(loose_name(root, path), place, Placement.RANK) for path, place in places]
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
                if tree := below(speaker_name(root, path, speaker), arrays, taken):
                    speaker.load_state_dict(tree_value(tree, type(speaker).__name__, device))
            for path, place in found.loose.items():
                if (name := loose_name(root, path)) in arrays:
                    put_back(place, arrays[name])
                    taken.add(name)
        for name, module in self.extra_state:
            if tree := below(name, arrays, taken):
                module.set_extra_state(tree_value(tree, type(module).__name__, device))
        refuse_unplaced(arrays, taken)

    def reseed(self, seed: int) -> None:
        """Begins other streams of the random generators that are held."""
        speakers = [speaker for root in self.roots for speaker in self.find(root).speakers.values()]
        for number, generator in enumerate(one for one in speakers if isinstance(one, Generator)):
            generator.reseed(derive(seed, number))

    def _is_end(self, value: Any) -> bool:
        return isinstance(value, (Tensor, np.ndarray, *GENERATORS)) or id(value) in self.modules or speaks(value)

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
            speaker_name(root, path, speaker),
            speaker.state_dict(),
            Placement.RANK if isinstance(speaker, Generator) else root.placement,
            f"the state of {type(speaker).__name__}",
        )
    ]


def speaker_name(root: Root, path: str, speaker: Any) -> str:
    """Names of what an object says begin so."""
    return f"{'rng/' if isinstance(speaker, Generator) else ''}held/{root.name}/dict/{path or 'itself'}"


def loose_name(root: Root, path: str) -> str:
    """Name of what is kept in a plain attribute."""
    return f"held/{root.name}/own/{path}"


def optimizer_name(value: Any) -> str:
    """For a message."""
    return "an optimizer" if isinstance(value, Mapping) else type(value).__name__


def value_of(tensor: StateTensor) -> NDArray[Any]:
    """A copy."""
    out = np.empty(tensor.shape, "uint16" if tensor.dtype == "bfloat16" else tensor.dtype)
    tensor.copy_into(out)
    return out
