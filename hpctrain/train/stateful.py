"""Objects with a ``state_dict``, and what happens to their state on a different number of ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from hpctrain.comm.group import Group
from hpctrain.errors import UserError, kind_of
from hpctrain.system.array_types import Array
from hpctrain.train.framework import StateSource
from hpctrain.train.saved_arrays import is_inexact, items_of, numbers_of
from hpctrain.train.state import Placement, StateTensor
from hpctrain.train.tree import LEAF_NAME, Leaves, tree_tensors, tree_value

Rule = Literal["keep", "reset", "split"]
STATE = "state/"
"""Prefix of the names of state that a task declares."""
HOOKS = "hooks/"
"""Prefix of the names of hook state."""


@runtime_checkable
class Stateful(Protocol):
    """An object that saves and restores its own state."""

    def state_dict(self) -> Any:
        """Returns the whole state."""

    def load_state_dict(self, saved: Any) -> Any:
        """Restores what ``state_dict`` returned."""


@runtime_checkable
class Splits(Protocol):
    """State that can be redistributed over a different number of ranks."""

    def merge(self, states: Sequence[Any]) -> Any:
        """Combines the states of all ranks, in rank order, into one."""

    def split(self, whole: Any, rank: int, ranks: int) -> Any:
        """Returns one rank's part of the combined state; does not change the object."""


@dataclass(frozen=True)
class PerRank:
    """Rank-local state, for ``state={"name": PerRank(...)}`` of a task.

    Raises:
        UserError: the rule is not one of the three, or it is ``split`` and the object has no ``merge`` and ``split``.
    """

    value: Any
    """An object with ``state_dict`` and ``load_state_dict``."""
    on_other_ranks: Rule = "keep"
    """What a resume on a different number of ranks does. keep: each rank restores the state saved by the rank of the
    same number, and ranks without one keep the task's initial state; reset: all ranks keep the task's initial state;
    split: the object's ``merge(states)`` combines the states of all old ranks, in rank order, and ``split(whole, rank,
    ranks)`` gives each new rank its part."""

    def __post_init__(self) -> None:
        if self.on_other_ranks not in ("keep", "reset", "split"):
            fix = "write keep, reset or split"
            raise UserError(f"PerRank(..., on_other_ranks={self.on_other_ranks!r}) is not a rule", fix)
        if self.on_other_ranks == "split" and not isinstance(self.value, Splits):
            raise UserError(
                f"PerRank(..., on_other_ranks='split') holds {kind_of(self.value)}, which cannot be split",
                "give it merge(states) and split(whole, rank, ranks), or write on_other_ranks='keep' or 'reset'",
            )


@dataclass(frozen=True)
class Kept:
    """An object whose state is part of checkpoints."""

    name: str
    """``hooks/<name>`` or ``state/<name>``: prefix of the names of its tensors."""
    value: Stateful
    rule: Rule | None = None
    """How rank-local state is redistributed; None if all ranks use rank 0's state."""

    @property
    def label(self) -> str:
        """The name in messages: ``state 'lanes'``."""
        kind, _, name = self.name.partition("/")
        return f"{'hook' if f'{kind}/' == HOOKS else 'state'} {name!r}"

    @property
    def placement(self) -> Placement:
        """Placement of its tensors."""
        return Placement.FIRST if self.rule is None else Placement.RANK

    def tensors(self, leaves: Leaves) -> list[StateTensor]:
        """The current state; empty for a hook without state. Raises UserError if a checkpoint cannot hold it."""
        state = self.value.state_dict()
        if self.name.startswith(HOOKS) and isinstance(state, Mapping) and not state:
            return []
        return tree_tensors(self.name, state, self.placement, leaves, f"the state_dict of {self.label}")

    def load(self, arrays: Mapping[str, Array], leaves: Leaves) -> None:
        """Restores the state from the arrays of ``tensors``, named without the object's prefix."""
        self.value.load_state_dict(tree_value(arrays, leaves, f"the {self.label}"))


def kept_state(state: Any) -> list[Kept]:
    """The objects that a task declares as its state.

    Raises:
        UserError: it is not a dict of objects with ``state_dict`` and ``load_state_dict``, or a name is not allowed.
    """
    if not isinstance(state, Mapping):
        fix = 'write state={"name": object}'
        raise UserError(f"state= of the task is {kind_of(state)}, not a dict of objects by name", fix)
    return [_kept(name, value) for name, value in state.items()]


def _kept(name: Any, given: Any) -> Kept:
    if not isinstance(name, str) or not LEAF_NAME.fullmatch(name):
        fix = "use up to 200 printable characters without a slash"
        raise UserError(f"state= of the task has the key {name!r}, under which nothing can be saved", fix)
    value, rule = (given.value, given.on_other_ranks) if isinstance(given, PerRank) else (given, None)
    if isinstance(value, type) or not isinstance(value, Stateful):
        raise UserError(
            f"state {name!r} of the task is {kind_of(value)}, which does not say what its state is",
            "give an object with state_dict() and load_state_dict(saved)",
        )
    return Kept(f"{STATE}{name}", value, rule)


@contextlib.contextmanager
def unchanged(objects: Sequence[Kept], leaves: Leaves) -> Iterator[None]:
    """Restores the state of the objects after the body."""
    before = [{tensor.name: value_of(tensor) for tensor in one.tensors(leaves)} for one in objects]
    try:
        yield
    finally:
        for one, arrays in zip(objects, before, strict=True):
            if arrays:
                one.load({name.removeprefix(f"{one.name}/"): array for name, array in arrays.items()}, leaves)


def value_of(tensor: StateTensor) -> Array:
    """Copies a tensor to the host; bfloat16 as uint16."""
    out = np.empty(tensor.shape, "uint16" if tensor.dtype == "bfloat16" else tensor.dtype)
    tensor.copy_into(out)
    return out


def make_equal(framework: StateSource, group: Group) -> None:
    """Makes diverged ranks equal again: averages floating-point state and takes the rest from rank 0. Collective.

    Rank-local state (random states, statistics) is left alone.
    """
    tensors = {one.name: one for one in framework.state() if one.placement is Placement.REPLICATED}
    arrays = {name: value_of(tensor) for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        if is_inexact(tensor.dtype):
            numbers = numbers_of(arrays[name], tensor.dtype)
            group.add(numbers, "become equal again")
            numbers /= group.size
            arrays[name] = items_of(numbers, tensor.dtype)
        else:
            group.broadcast_array(arrays[name], "become equal again")
    framework.load(arrays)
