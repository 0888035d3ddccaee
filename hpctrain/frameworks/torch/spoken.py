"""State that objects report themselves: by ``state_dict``, by the extra state of modules, by random generators."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from hpctrain.errors import UserError
from hpctrain.frameworks.named_state import plain_name
from hpctrain.frameworks.torch.state import TorchTensor, tensor_of
from hpctrain.train.state import Placement, StateTensor
from hpctrain.train.stateful import Stateful
from hpctrain.train.tree import HostLeaves, Leaves, tree_tensors

GENERATORS = (torch.Generator, np.random.Generator, random.Random)
HOST, DEVICE = "host", "device"
"""Where a tensor was, in its kind."""


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
    return isinstance(value, Stateful) and not isinstance(value, (Module, type))


def extra_states(root: str, path: str, module: Module) -> list[tuple[str, Module]]:
    """Modules within one that say themselves what else their state is, by the names of that. Raises UserError."""
    found = [
        (plain_name(".".join(filter(None, (path, name)))) or "itself", each)
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


def extra_tensors(modules: Iterable[tuple[str, Module]], leaves: Leaves) -> list[StateTensor]:
    """The extra state of modules."""
    return [
        tensor
        for name, module in modules
        for tensor in tree_tensors(
            name, module.get_extra_state(), Placement.RANK, leaves, f"the extra state of {type(module).__name__}"
        )
    ]


class TorchLeaves(HostLeaves):
    """Tensors as well.

    Args:
        device: where those go that were not on the host.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def kind(self, value: Any) -> str | None:
        if not isinstance(value, Tensor):
            return super().kind(value)
        if value.layout is not torch.strided or value.is_quantized:
            return None
        place = HOST if value.device.type == "cpu" else DEVICE
        return f"{place} uint16" if value.dtype == torch.uint16 else place  # saved as bfloat16 is

    def tensor(self, name: str, value: Any, placement: Placement) -> StateTensor:
        return (
            TorchTensor(name, value, placement) if isinstance(value, Tensor) else super().tensor(name, value, placement)
        )

    def value(self, kind: str, array: NDArray[Any]) -> Any:
        place, _, dtype = kind.partition(" ")
        if place not in (HOST, DEVICE):
            return super().value(kind, array)
        tensor = torch.from_numpy(np.array(array)) if dtype else tensor_of(array)
        return tensor.to(self.device if place == DEVICE else "cpu")


def below(name: str, arrays: Mapping[str, NDArray[Any]], taken: set[str]) -> dict[str, NDArray[Any]]:
    """Arrays whose names begin with a name, without it; notes them as taken."""
    found = {full: arrays[full] for full in arrays if full.startswith(f"{name}/")}
    taken.update(found)
    return {full.removeprefix(f"{name}/"): array for full, array in found.items()}
