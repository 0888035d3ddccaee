"""Extra state of a task's modules, and what a model adds to its ``state_dict``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch.nn import Module

from hpctrain.backends.named_state import plain_name
from hpctrain.backends.torch.state.tensors import ADDED_KEYS, added_keys, digest
from hpctrain.errors import UserError
from hpctrain.system.user_errors import words
from hpctrain.train.state import Placement, StateTensor
from hpctrain.train.tree import Leaves, tree_tensors


def extra_states(root: str, path: str, module: Module) -> list[tuple[str, Module]]:
    """Modules within one that have extra state, with its name. Raises UserError if it cannot be restored."""
    found = [
        (plain_name(".".join(filter(None, (path, name)))) or "itself", each)
        for name, each in module.named_modules()
        if type(each).get_extra_state is not Module.get_extra_state
    ]
    mute = [type(each).__name__ for _, each in found if type(each).set_extra_state is Module.set_extra_state]
    if mute:
        raise UserError(
            f"{mute[0]} has get_extra_state and no set_extra_state, so its state could not be restored",
            "give it both",
        )
    return [(f"held/{root}/extra/{name}", each) for name, each in found]


ADDED = f"held/model/extra/{ADDED_KEYS}"


@dataclass(frozen=True)
class AddedKeys:
    """What a model adds to its ``state_dict``, as extra state."""

    model: Module

    def get_extra_state(self) -> Any:
        return added_keys(self.model)

    def set_extra_state(self, saved: Any) -> None:
        self.model.load_state_dict({**self.model.state_dict(), **saved})


def require_restorable(model: Module) -> None:
    """Raises UserError if a model adds keys to ``state_dict`` that its ``load_state_dict`` cannot restore."""
    added = AddedKeys(model)
    if not (keys := added_keys(model)):
        return
    before = digest(list(model.parameters()))
    try:
        added.set_extra_state(keys)
        problem = "changes parameters" if digest(list(model.parameters())) != before else ""
    except Exception as error:  # from the user's code
        problem = f"fails: {words(error)}"
    if problem:
        raise UserError(
            f"state_dict of the model adds {min(keys)}, and load_state_dict with what state_dict returned {problem}",
            "make it a buffer, or give its module get_extra_state and set_extra_state",
        )


def extra_tensors(modules: Iterable[tuple[str, Any]], leaves: Leaves) -> list[StateTensor]:
    """The extra state of modules."""
    return [
        tensor
        for name, module in modules
        for tensor in tree_tensors(
            name, module.get_extra_state(), Placement.RANK, leaves, f"the extra state of {type(module).__name__}"
        )
    ]
