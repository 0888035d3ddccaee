"""State that objects report themselves: by ``state_dict``, by the extra state of modules, by random generators."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from hpctrain.errors import UserError
from hpctrain.frameworks.torch.state import TorchTensor, tensor_of
from hpctrain.train.state import ArrayTensor, Placement, StateTensor
from hpctrain.train.tree import put_together, take_apart

GENERATORS = (torch.Generator, np.random.Generator, random.Random)


@runtime_checkable
class Speaker(Protocol):
    """An object that says itself what its state is."""

    def state_dict(self) -> Any:
        """All of it."""

    def load_state_dict(self, state: Any) -> Any:
        """Takes over what ``state_dict`` gave."""


@dataclass(frozen=True)
class Generator:
    """A random generator of the user's own, as a speaker."""

    value: torch.Generator | np.random.Generator | random.Random

    def state_dict(self) -> Any:
        if isinstance(self.value, torch.Generator):
            return self.value.get_state()
        return self.value.getstate() if isinstance(self.value, random.Random) else self.value.bit_generator.state

    def load_state_dict(self, state: Any) -> None:
        if isinstance(self.value, torch.Generator):
            self.value.set_state(state.cpu())
        elif isinstance(self.value, random.Random):
            self.value.setstate(state)
        else:
            self.value.bit_generator.state = state

    def reseed(self, seed: int) -> None:
        """Begins another stream."""
        if isinstance(self.value, torch.Generator):
            self.value.manual_seed(seed)
        elif isinstance(self.value, random.Random):
            self.value.seed(seed)
        else:
            self.value.bit_generator.state = type(self.value.bit_generator)(seed).state


def speaks(value: Any) -> bool:
    """Whether an object other than a module has methods of its own that save and load its state."""
    if isinstance(value, Optimizer):
        kind = type(value)
        return kind.state_dict is not Optimizer.state_dict and kind.load_state_dict is not Optimizer.load_state_dict
    return isinstance(value, Speaker) and not isinstance(value, (Module, type))


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
    """A nested value as named tensors. Raises UserError if it holds what cannot be saved."""
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
    found = {full: arrays[full] for full in arrays if full.startswith(f"{name}/")}
    taken.update(found)
    return {full.removeprefix(f"{name}/"): array for full, array in found.items()}
