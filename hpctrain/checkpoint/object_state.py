"""State of objects in a checkpoint: hooks, and the objects in a task's ``state``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from hpctrain.checkpoint.format.durable_files import crc32
from hpctrain.checkpoint.format.layout import TensorSpec, check_tensors
from hpctrain.checkpoint.reading import Loaded
from hpctrain.checkpoint.resume_compat import is_accepted
from hpctrain.comm.group import Group
from hpctrain.errors import UserError, foreign_errors
from hpctrain.system.array_types import Array
from hpctrain.system.user_errors import own_line, words
from hpctrain.train.state import Placement, StateTensor
from hpctrain.train.stateful import HOOKS, STATE, Kept, Splits, value_of
from hpctrain.train.tree import Leaves, tree_value

OBJECTS = "objects"
"""Key of a checkpoint's ``meta``: placement of each object's state, by the object's name."""


@dataclass(frozen=True)
class ObjectState:
    """State of all objects that have any, at one step."""

    placements: Mapping[str, str]
    """``first`` or ``rank`` by object."""
    tensors: Sequence[StateTensor]


def state_of(objects: Sequence[Kept], leaves: Leaves) -> ObjectState:
    """Collect the objects' state. Raises UserError if a state_dict fails or cannot be saved."""
    placements: dict[str, str] = {}
    tensors: list[StateTensor] = []
    for one in objects:
        with blamed(one, "its state_dict fails", "correct state_dict: it is called before the first step, too"):
            found = one.tensors(leaves)
        if found and one.name in placements:
            raise UserError(f"two objects with state are called {one.label}", "give each a unique name")
        placements |= {one.name: one.placement.value} if found else {}
        tensors += found
    check_tensors([TensorSpec(tensor.name, tensor.shape, tensor.dtype, None) for tensor in tensors])
    return ObjectState(placements, tensors)


def require_equal(group: Group, objects: Sequence[Kept], leaves: Leaves, step: int) -> None:
    """Raise UserError, on all ranks, if state of a task that is not ``PerRank`` differs between ranks. Collective."""
    shared = [one for one in objects if one.name.startswith(STATE) and one.rule is None]
    if not shared:
        return
    sums = [[(tensor.name, crc32(value_of(tensor).tobytes())) for tensor in one.tensors(leaves)] for one in shared]
    of_ranks = group.allgather(sums, "compare the task's state")
    for number, one in enumerate(shared):
        odd = [rank for rank, each in enumerate(of_ranks) if each[number] != of_ranks[0][number]]
        if odd:
            fix = "wrap it in hpctrain.PerRank(...) if each rank has its own; else change it identically on all"
            raise UserError(f"{one.label} of the task differs between ranks 0 and {odd[0]} after {step} steps", fix)


def restore(
    objects: Sequence[Kept], loaded: Loaded, leaves: Leaves, group: Group, accepted: Sequence[str] = ()
) -> list[str]:
    """Restore each object's state from a checkpoint.

    Args:
        objects: the run's objects.
        loaded: the checkpoint.
        leaves: the types that state may contain.
        group: the ranks; there is no communication.
        accepted: keys that may differ from the checkpoint's: ``state``, or ``state.<name>``.

    Returns:
        Sentences to print for the user.

    Raises:
        UserError: only the task or only the checkpoint has a state, or an object's load_state_dict fails.
    """
    names = {one.name for one in objects}
    saved = loaded.meta.get(OBJECTS, {})
    notes = [gone(name, str(loaded.path), accepted) for name in sorted(saved.keys() - names)]
    for one in objects:
        if one.name in saved:
            notes += give(one, saved[one.name], loaded, leaves, group)
        elif one.name.startswith(STATE) and one.tensors(leaves):
            notes.append(new(one, str(loaded.path), accepted))
    return notes


def gone(name: str, where: str, accepted: Sequence[str]) -> str:
    """Message about a saved object that the run no longer has; raises UserError for task state unless accepted."""
    kind, _, own = name.partition("/")
    if f"{kind}/" == HOOKS:
        return f"state of hook {own} is left out: this run has none"
    if not is_accepted(f"state.{own}", accepted):
        fix = f"name it again in state= of the task, or leave what was saved of it out: --accept state.{own}"
        raise UserError(f"{where} holds state {own!r}, which the task no longer has", fix)
    return f"state {own!r} is left out, as accepted: the task no longer has it"


def new(one: Kept, where: str, accepted: Sequence[str]) -> str:
    """Message about task state that the checkpoint lacks; raises UserError unless accepted."""
    own = one.name.removeprefix(STATE)
    if not is_accepted(f"state.{own}", accepted):
        fix = f"if it is new, let it begin as the task made it: --accept state.{own}; else restore its old name"
        raise UserError(f"the task has state {own!r}, of which {where} holds nothing", fix)
    return f"state {own!r} begins as the task made it, as accepted: the checkpoint holds none"


def give(one: Kept, placement: str, loaded: Loaded, leaves: Leaves, group: Group) -> Iterator[str]:
    """Restore one object; yields a message on rank-local state if the number of ranks differs."""
    if placement != one.placement.value:
        per_rank = placement == Placement.RANK
        raise UserError(
            f"{loaded.path} holds {one.label} {'of each rank' if per_rank else 'as one for all ranks'}, and the task "
            f"declares it as {'one for all ranks' if per_rank else 'each rank its own'}",
            f"write {'PerRank(...)' if per_rank else 'the object without PerRank'} in state= of the task, as it was",
        )
    fix = "correct load_state_dict, or begin again with --fresh"
    blame = blamed(one, f"it cannot load what {loaded.path} holds of it", fix)
    if one.rule is None or loaded.ranks == group.size:
        with blame:
            one.load(below(one.name, loaded.arrays), leaves)
        return
    old = loaded.ranks
    if one.rule == "reset":
        yield f"{one.label} of {old} ranks begins as the task made it, on {group.size} ranks"
    elif one.rule == "keep":
        if group.rank < old:
            with blame:
                one.load(of_rank(one.name, loaded, group.rank), leaves)
        rest = (
            f"ranks from {old} on begin as the task made it" if group.size > old else "that of the others is left out"
        )
        yield f"{one.label} of {old} ranks: each rank takes over that of its number; {rest}"
    else:
        with blame:
            assert isinstance(one.value, Splits), "PerRank has checked it"
            states = [tree_value(of_rank(one.name, loaded, rank), leaves, one.label) for rank in range(old)]
            one.value.load_state_dict(one.value.split(one.value.merge(states), group.rank, group.size))
        yield f"{one.label} of {old} ranks is split over {group.size}"


def below(name: str, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """The arrays of an object, by name without the object's prefix."""
    return {full.removeprefix(f"{name}/"): each for full, each in arrays.items() if full.startswith(f"{name}/")}


def of_rank(name: str, loaded: Loaded, rank: int) -> dict[str, Array]:
    """An object's state on a saved rank, if the number of ranks differs."""
    return below(name, {full: values[rank] for full, values in loaded.of_ranks.items() if rank in values})


def blamed(one: Kept, what: str, fix: str) -> AbstractContextManager[None]:
    """Turn errors in an object's code into UserErrors that name it and the line; HpctrainErrors propagate."""

    def error_of(error: Exception) -> UserError:
        return UserError(f"{one.label}: {what}: {type(error).__name__}: {words(error)}{own_line(error)}", fix)

    return foreign_errors(error_of)
