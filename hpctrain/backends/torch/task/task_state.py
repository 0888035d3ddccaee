"""Finds state that a torch task keeps outside its model: in its optimizers, its loss, ``forward`` and ``step``."""

from __future__ import annotations

import functools
import hashlib
import random
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import SGD, Optimizer

from hpctrain.backends.named_state import load_tensors, plain_name, refuse_unplaced
from hpctrain.backends.torch.state.optimizer import OptimizerPart
from hpctrain.backends.torch.state.tensors import TorchTensor, added_keys, digest, module_tensors
from hpctrain.backends.torch.state.torch_leaves import TorchLeaves
from hpctrain.backends.torch.task.extra_state import ADDED, AddedKeys, extra_states, extra_tensors
from hpctrain.errors import UserError
from hpctrain.train.seeds import derive
from hpctrain.train.state import Placement, StateTensor
from hpctrain.train.stateful import Stateful, value_of
from hpctrain.train.tree import Leaves, tree_tensors, tree_value
from hpctrain.train.walk_objects import own_attributes, putting_back, reached

PLAIN_MODULE = frozenset(vars(Module())) - {"_modules"}
"""Attributes that every torch module has."""
PLAIN_OPTIMIZER = frozenset(vars(SGD([torch.zeros(1)], lr=1.0)))
"""Attributes that every torch optimizer has."""


def attributes(value: Any, own: bool) -> Iterable[str]:
    """Attributes to search; in optimizers and modules, all but torch's own and saved extra state."""
    if isinstance(value, Optimizer):
        return [name for name in vars(value) if name not in PLAIN_OPTIMIZER]
    if isinstance(value, Module):
        own = own and type(value).get_extra_state is Module.get_extra_state
        return [name for name in vars(value) if name not in PLAIN_MODULE] if own else ["_modules"]
    return own_attributes(value, own)


@dataclass(frozen=True)
class Root:
    """An object of a task, other than the model, that may hold state."""

    name: str
    value: Any
    placement: Placement
    """Placement of its state: the optimizer's is equal on all ranks; objects that process a rank's own samples have
    per-rank state, except for parameters of modules."""


@dataclass
class FoundState:
    """State that a root holds, by path."""

    modules: dict[str, Module]
    stateful: dict[str, Any]
    """Objects with ``state_dict`` and ``load_state_dict``, and random generators."""
    loose: dict[str, Any]
    """Numbers, arrays and tensors in plain attributes, which are not saved."""


UPDATES = 2
"""Number of first updates in which changes of unsaved values are detected."""


class TaskState:
    """State that a task keeps outside its model and the ``state`` of its optimizers.

    - Modules: their parameters and buffers, and their extra state.
    - Objects with ``state_dict`` and ``load_state_dict``: what these return.

    Args:
        optimizer: the task's optimizer, equal on all ranks.
        others: objects that process a rank's own samples, by name: the loss, ``forward``, ``step``.
        model: the model; its tensors are skipped, but not its extra state, nor what else its modules hold.
        apart: objects that are saved under their own names; their contents are skipped.

    Raises:
        UserError: the extra state of a module cannot be restored.
    """

    def __init__(self, optimizer: Any, others: Mapping[str, Any], model: Module, apart: Iterable[Any] = ()) -> None:
        own = [Root(name, value, Placement.RANK) for name, value in others.items()]
        self.roots = [Root("optimizer", optimizer, Placement.REPLICATED), *own, Root("model", model, Placement.RANK)]
        self.model = model
        self.names = {id(parameter): plain_name(name) for name, parameter in model.named_parameters()}
        self.modules = {id(module) for module in (*model.modules(), *getattr(model, "without_tensors", ()))}
        self.apart = {id(each) for each in apart}
        self.extra_state = extra_states("model", "", model)
        self.signs: dict[str, str] = {}
        self.undeclared: dict[str, None] = {}
        """Names of values that seem to be state but are not saved, in the order in which they were found."""
        for root in self.roots:
            found = self.find(root)
            self.signs |= {label(root, path): sign(value) for path, value in found.loose.items()}
            for path, module in found.modules.items():
                self.extra_state += extra_states(root.name, path, module)

    def parts(self) -> list[OptimizerPart]:
        """All optimizers in the task's optimizer, itself included, inner ones first."""
        root = self.roots[0].value
        places = list(reached(root, lambda at: self._is_end(at) and not saves_itself(at), attributes, self.names))
        outermost = [path for path, value in places if saves_itself(value)]
        return [
            OptimizerPart(path, value, any(not outer or f"{path}.".startswith(f"{outer}.") for outer in outermost))
            for path, value in reversed(places)
            if isinstance(value, Optimizer)
        ]

    def modules_of_functions(self) -> list[Module]:
        """Modules that the loss, ``forward`` and ``step`` hold besides the model, such as a loss with class weights."""
        return [module for root in self.roots[1:] for module in self.find(root).modules.values()]

    def find(self, root: Root) -> FoundState:
        """Finds the state that a root holds now. Raises UserError if its names would differ between processes."""
        ids = {*self.modules, *self.names}
        optimizers = []
        found = FoundState({}, {}, {})
        inner = set(self.modules)
        is_end = self._is_end_of_model if root.value is self.model else self._is_end
        for path, value in reached(root.value, is_end, attributes, self.names):
            ids |= set() if id(value) in self.modules else {id(value), *map(id, parameters_in(value))}
            if id(value) in self.apart:
                continue
            optimizers += [path] if isinstance(value, Optimizer) else []
            if isinstance(value, Module):
                if id(value) not in inner:
                    inner |= {id(module) for module in value.modules()}
                    found.modules[path] = value
            elif isinstance(value, GENERATORS):
                found.stateful[path] = Generator(value)
            elif saves_itself(value):
                found.stateful[path] = value
            elif is_loose(value):
                found.loose[path] = value
        refuse_ids(root.name, [*found.modules, *found.stateful, *optimizers], ids)
        return found

    def tensors(self, known: Iterable[Tensor], updates: int) -> list[StateTensor]:
        """State as ``held/<root>/<kind>/<path>``.

        Args:
            known: tensors that are saved under other names.
            updates: number of updates since the task was made.

        Raises:
            UserError: there is state that could not be restored.
        """
        memory = {tensor.data_ptr() for tensor in (*self.model.parameters(), *self.model.buffers(), *known)}
        tensors: list[StateTensor] = []
        for root in self.roots:
            found = self.find(root)
            held = [tensor for tensor in module_state(root, found) if tensor.value.data_ptr() not in memory]
            memory |= {tensor.value.data_ptr() for tensor in held}
            tensors += [*held, *stateful_tensors(root, found, self.leaves)]
            if updates <= UPDATES:
                self._look_at(root, found, memory)
        return tensors + extra_tensors(self.all_extra_state(), self.leaves)

    def all_extra_state(self) -> list[tuple[str, Any]]:
        """Modules with extra state, and what the model adds to its ``state_dict``, by name."""
        return self.extra_state + ([(ADDED, AddedKeys(self.model))] if added_keys(self.model) else [])

    def _look_at(self, root: Root, found: FoundState, memory: set[int]) -> None:
        """Records changed plain attributes. Attributes that a loss adds later are assumed to be caches and logs."""
        for path, value in found.loose.items():
            if isinstance(value, Tensor) and value.data_ptr() in memory:
                continue
            name, now = label(root, path), sign(value)
            before = self.signs.setdefault(name, now) if root is self.roots[0] else self.signs.get(name, now)
            if before != now:
                self.undeclared[name] = None

    def snapshot(self) -> Callable[[], None]:
        """Returns a function that restores everything that forward passes may change.

        Besides saved state, these are values in plain attributes, closures and globals.
        """
        tensors = extra_tensors(self.all_extra_state(), self.leaves)
        plain: list[Callable[[], object]] = []
        for root in self.roots[1:]:
            found = self.find(root)
            tensors += [*module_state(root, found), *stateful_tensors(root, found, self.leaves)]
            is_end = self._is_end_of_model if root.value is self.model else self._is_end
            plain += putting_back(root.value, is_end, attributes, lambda value: value is None or is_loose(value))
            plain += [
                functools.partial(refill, value, copied(value)) for value in found.loose.values() if can_refill(value)
            ]
        arrays = {tensor.name: value_of(tensor) for tensor in tensors}

        def put_back() -> None:
            for put in plain:
                put()
            self.load(arrays)

        return put_back

    def load(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Loads state by name; missing state is unchanged.

        Raises:
            UserError: a saved array has no place or does not fit.
        """
        taken: set[str] = set()
        for root in self.roots:
            found = self.find(root)
            held = [tensor for tensor in module_state(root, found) if tensor.name in arrays]
            load_tensors(held, arrays)
            taken |= {tensor.name for tensor in held}
            for path, holder in found.stateful.items():
                if tree := below(stateful_name(root, path, holder), arrays, taken):
                    holder.load_state_dict(tree_value(tree, self.leaves, f"the state of {type(holder).__name__}"))
        for name, module in self.all_extra_state():
            if tree := below(name, arrays, taken):
                module.set_extra_state(tree_value(tree, self.leaves, f"the extra state of {type(module).__name__}"))
        refuse_unplaced(arrays, taken)

    @property
    def leaves(self) -> TorchLeaves:
        """Leaves with the model's current device."""
        return TorchLeaves(next(self.model.parameters()).device)

    def reseed(self, seed: int) -> None:
        """Reseeds the held random generators."""
        for number, generator in enumerate(self.generators()):
            generator.reseed(derive(seed, number))

    def generators(self) -> list[Generator]:
        """The held random generators."""
        stateful = [holder for root in self.roots for holder in self.find(root).stateful.values()]
        return [one for one in stateful if isinstance(one, Generator)]

    def generators_checksum(self) -> int:
        """Checksum of their states."""
        states = [one.state_dict() for one in self.generators()]
        texts = [digest([state]) if isinstance(state, Tensor) else repr(state) for state in states]
        return zlib.crc32("".join(texts).encode())

    def _is_end_of_model(self, value: Any) -> bool:
        """The same within the model, whose modules are searched for what is neither a parameter nor a buffer."""
        return id(value) not in self.modules and self._is_end(value)

    def _is_end(self, value: Any) -> bool:
        is_saved = id(value) in self.modules or id(value) in self.apart
        return isinstance(value, (Tensor, np.ndarray, *GENERATORS)) or is_saved or saves_itself(value)


def label(root: Root, path: str) -> str:
    """What a value is called in messages."""
    return f"{root.name}: {path.replace('_modules.', '')}"


def parameters_in(value: Any) -> Iterable[Tensor]:
    """Parameters of an optimizer or a module."""
    if isinstance(value, Optimizer):
        return [each for group in value.param_groups for each in group["params"]]
    return value.parameters() if isinstance(value, Module) else ()


def refuse_ids(root: str, paths: Iterable[str], ids: set[int]) -> None:
    """Raises UserError if a part of a path is the id of an object."""
    for path in paths:
        if any(part.isdecimal() and int(part) in ids for part in path.split(".")):
            raise UserError(
                f"the {root} holds state at {path}, where a key is an object's id, which differs between processes",
                "use a list, or names or parameters of the model as keys",
            )


def module_state(root: Root, found: FoundState) -> list[TorchTensor]:
    """Parameters and buffers, as far as they are in ``state_dict``, of the modules that a root holds."""
    return [
        TorchTensor(f"held/{root.name}/module/{path}{'.' if path else ''}{name}", tensor, placement)
        for path, module in found.modules.items()
        for name, tensor, placement in module_tensors(module)
    ]


def stateful_tensors(root: Root, found: FoundState, leaves: Leaves) -> list[StateTensor]:
    """State of objects with a ``state_dict``."""
    tensors: list[StateTensor] = []
    for path, holder in found.stateful.items():
        name = stateful_name(root, path, holder)
        what = f"the state of {type(holder).__name__}"
        placement = Placement.RANK if isinstance(holder, Generator) else root.placement
        tensors += tree_tensors(name, holder.state_dict(), placement, leaves, what)
    return tensors


def stateful_name(root: Root, path: str, holder: Any) -> str:
    """Name prefix of such an object's state."""
    return f"{'rng/' if isinstance(holder, Generator) else ''}held/{root.name}/dict/{path or 'itself'}"


GENERATORS = (torch.Generator, np.random.Generator, random.Random)


@dataclass(frozen=True)
class Generator:
    """A user's random generator, with ``state_dict`` and ``load_state_dict``."""

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
        """Seeds the generator."""
        if isinstance(self.value, torch.Generator):
            self.value.manual_seed(seed)
        elif isinstance(self.value, random.Random):
            self.value.seed(seed)
        else:
            self.value.bit_generator.state = type(self.value.bit_generator)(seed).state


def saves_itself(value: Any) -> bool:
    """Whether an object other than a module has methods that save and load its state."""
    if isinstance(value, Optimizer):
        kind = type(value)
        return kind.state_dict is not Optimizer.state_dict and kind.load_state_dict is not Optimizer.load_state_dict
    # The first two questions are quick, and this is asked of whatever a model holds.
    return hasattr(value, "state_dict") and not isinstance(value, (Module, type)) and isinstance(value, Stateful)


def below(name: str, arrays: Mapping[str, NDArray[Any]], taken: set[str]) -> dict[str, NDArray[Any]]:
    """Arrays below a name, with that prefix removed; adds them to ``taken``."""
    found = {full: arrays[full] for full in arrays if full.startswith(f"{name}/")}
    taken.update(found)
    return {full.removeprefix(f"{name}/"): array for full, array in found.items()}


SAMPLE = 4096
"""Number of values of an array or tensor that are compared to detect a change."""


def is_loose(value: Any) -> bool:
    """Whether a value in a plain attribute may be state."""
    if isinstance(value, Tensor):
        return value.layout is torch.strided and not value.is_meta
    if isinstance(value, (np.ndarray, np.generic)):
        return value.dtype.kind in "biufc"
    return isinstance(value, (bool, int, float))


MOST_BYTES = 16 << 20
"""Largest tensor or array whose values are restored after passes: larger ones are assumed to be data."""


def can_refill(value: Any) -> bool:
    """Whether a loose value is restored in place after passes; parameters are not, since passes do not change them."""
    if isinstance(value, np.ndarray):
        return value.flags.writeable and value.nbytes <= MOST_BYTES
    is_filled = isinstance(value, Tensor) and not isinstance(value, Parameter) and 0 not in value.stride()
    return is_filled and value.nbytes <= MOST_BYTES


def copied(value: Any) -> Any:
    """Copies a tensor's or array's values."""
    return value.detach().clone() if isinstance(value, Tensor) else value.copy()


def refill(value: Any, before: Any) -> None:
    """Copies a tensor's or array's values back."""
    if isinstance(value, Tensor):
        with torch.inference_mode():  # the tensor may be an inference tensor
            value.data.copy_(before)
    else:
        value[...] = before


def sign(value: Any) -> str:
    """Returns a text that changes when a number, array or tensor does."""
    if isinstance(value, Tensor):
        return digest([value.detach().flatten()[:SAMPLE]])
    return hashlib.sha256(value.flat[:SAMPLE].tobytes()).hexdigest() if isinstance(value, np.ndarray) else repr(value)
