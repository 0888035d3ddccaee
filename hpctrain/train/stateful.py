"""Objects that say themselves what their state is, and what becomes of it at another number of ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from hpctrain.comm.group import Group
from hpctrain.errors import UserError, kind_of
from hpctrain.train.framework import StateSource
from hpctrain.train.state import Placement, StateTensor
from hpctrain.train.tree import LEAF_NAME, Leaves, tree_tensors, tree_value

Rule = Literal["keep", "reset", "split"]
STATE = "state/"
"""Begins the names of what a task declares as its state."""
HOOKS = "hooks/"
"""The same for hooks."""


@runtime_checkable
class Stateful(Protocol):
    """An object that says itself what its state is."""

    def state_dict(self) -> Any:
        """All of it."""

    def load_state_dict(self, saved: Any) -> Any:
        """Takes over what ``state_dict`` gave."""


@runtime_checkable
class Splits(Protocol):
    """State that can be redistributed over another number of ranks."""

    def merge(self, states: Sequence[Any]) -> Any:
        """One state of those of all ranks, in their order."""

    def split(self, whole: Any, rank: int, ranks: int) -> Any:
        """A rank's part of that; changes nothing in the object."""


@dataclass(frozen=True)
class PerRank:
    """Rank-local state, for ``state={"name": PerRank(...)}`` of a task.

    Raises:
        UserError: the rule is none of the three, or it is ``split`` and the object cannot.
    """

    value: Any
    """An object with ``state_dict`` and ``load_state_dict``."""
    on_other_ranks: Rule = "keep"
    """What a resume at another number of ranks does. keep: each rank takes over what the rank of its number had, and
    ranks without such a one begin as the task made it; reset: all begin as the task made it; split: the object's own
    ``merge(states)`` makes one state of those of all old ranks, in their order, and ``split(whole, rank, ranks)`` gives
    each new rank its part."""

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
    """``hooks/<name>`` or ``state/<name>``: begins the names of its tensors."""
    value: Stateful
    rule: Rule | None = None
    """Of rank-local state; None if rank 0's is that of all."""

    @property
    def spoken(self) -> str:
        """For a person: ``state 'lanes'``."""
        kind, _, name = self.name.partition("/")
        return f"{'hook' if f'{kind}/' == HOOKS else 'state'} {name!r}"

    @property
    def placement(self) -> Placement:
        """Of its tensors."""
        return Placement.FIRST if self.rule is None else Placement.RANK

    def tensors(self, leaves: Leaves) -> list[StateTensor]:
        """What it says now; nothing of a hook without state. Raises UserError if a checkpoint cannot keep that."""
        state = self.value.state_dict()
        if self.name.startswith(HOOKS) and isinstance(state, Mapping) and not state:
            return []
        return tree_tensors(self.name, state, self.placement, leaves, f"the state_dict of {self.spoken}")

    def load(self, arrays: Mapping[str, NDArray[Any]], leaves: Leaves) -> None:
        """Takes over the arrays of ``tensors``, by their names without its own."""
        self.value.load_state_dict(tree_value(arrays, leaves, f"the {self.spoken}"))


def kept_state(state: Any) -> list[Kept]:
    """What a task declares as its state.

    Raises:
        UserError: it is not a dict of objects with ``state_dict`` and ``load_state_dict``, or a name cannot be kept.
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
    """What the body changes in the state of objects is put back."""
    before = [{tensor.name: value_of(tensor) for tensor in one.tensors(leaves)} for one in objects]
    try:
        yield
    finally:
        for one, arrays in zip(objects, before, strict=True):
            if arrays:
                one.load({name.removeprefix(f"{one.name}/"): array for name, array in arrays.items()}, leaves)


def value_of(tensor: StateTensor) -> NDArray[Any]:
    """A copy; bfloat16 as uint16."""
    out = np.empty(tensor.shape, "uint16" if tensor.dtype == "bfloat16" else tensor.dtype)
    tensor.copy_into(out)
    return out


def make_equal(framework: StateSource, group: Group) -> None:
    """Gives ranks that trained apart one state: the mean of floating-point values, else the first rank's. Collective.

    Each rank keeps what is its own: random states and statistics.
    """
    arrays = {one.name: value_of(one) for one in framework.state() if one.placement is Placement.REPLICATED}
    for array in arrays.values():
        if array.dtype.kind == "f":
            group.add(array, "become equal again")
            array /= group.size
        else:
            group.broadcast_array(array, "become equal again")
    framework.load(arrays)
