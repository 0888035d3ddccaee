"""How parameters may be partitioned: what is known of a task's optimizers. Gives optimizers rows of parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer, SparseAdam

from hpctrain.backends.torch.state.optimizer import OptimizerPart, Together
from hpctrain.backends.torch.strategies.row_shares import RowRange
from hpctrain.backends.torch.task.task_state import TaskState
from hpctrain.errors import UserError

ELEMENTWISE = (
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam),
    *(torch.optim.RMSprop, torch.optim.Rprop, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.ASGD, SparseAdam),
)
"""Optimizers that update each element from its own gradient and state."""
SEPARATE = tuple(vars(torch.optim)[name] for name in ("Adafactor", "Muon") if hasattr(torch.optim, name))
"""Optimizers that update each parameter from its own gradient and state."""
VECTOR = 16
"""Elements of which rows must have a multiple where kernels treat the end of a tensor differently from its middle."""


@dataclass(frozen=True)
class ParameterTraits:
    """How the parameters of all optimizers may be sharded."""

    updated: Set[int] = frozenset()
    """Ids of the parameters that an optimizer updates."""
    elementwise: Set[int] = frozenset()
    """Ids of those whose rows can be updated separately, with the same result up to rounding."""
    by_rows: Set[int] = frozenset()
    """Ids of those of which the result is the same bitwise."""
    unknown: str | None = None
    """Type of an optimizer that may update a parameter from others, if any."""


def traits_of(parts: Sequence[OptimizerPart]) -> ParameterTraits:
    """What the optimizers allow."""
    updated, elementwise, by_rows = set[int](), set[int](), set[int]()
    unknown = None
    for optimizer in plain(parts):
        known = is_elementwise(optimizer)
        unknown = type(optimizer).__name__ if known is None else unknown
        for group in optimizer.param_groups:
            for parameter in (one for one in group["params"] if one.requires_grad and one.numel()):
                updated.add(id(parameter))
                if known and parameter.ndim and len(parameter) > 1:
                    elementwise.add(id(parameter))
                    if (parameter.itemsize > 2 and not group.get("fused")) or parameter[0].numel() % VECTOR == 0:
                        by_rows.add(id(parameter))
    return ParameterTraits(updated, elementwise, by_rows, unknown)


def is_elementwise(optimizer: Optimizer) -> bool | None:
    """Whether it updates each element by itself, or only each parameter (False); None if neither is known.

    Known are those of PyTorch, and classes derived from them that do not replace ``step``. Others have an attribute
    ``elementwise``.
    """
    own = getattr(optimizer, "elementwise", None)
    if own is not None:
        return bool(own)
    steps = next(kind for kind in type(optimizer).__mro__ if "step" in vars(kind))
    if steps in ELEMENTWISE:
        return True
    return False if steps in SEPARATE else None


def require_elementwise(optimizer: Optimizer, parameter: Tensor, name: str) -> None:
    """Raises UserError unless the optimizer, if it has a parameter that is split, updates each element by itself."""
    has_it = any(one is parameter for group in optimizer.param_groups for one in group["params"])
    if has_it and not (known := is_elementwise(optimizer)):
        raise UserError(
            f"{type(optimizer).__name__} {'is not known to' if known is None else 'does not'} update each element of "
            f"{name} by itself, and each rank has only a part of it",
            "use an optimizer that does, such as AdamW (your own says so by an attribute elementwise = True), or leave "
            "the layer whole",
        )


def plain(parts: Sequence[OptimizerPart]) -> list[Optimizer]:
    """Optimizers that update parameters themselves."""
    return [part.optimizer for part in parts if type(part.optimizer) is not Together]


def unsuited(parts: Sequence[OptimizerPart], task_state: TaskState) -> str | None:
    """Type of an optimizer that contains others, or keeps state outside ``state`` and ``param_groups``, if any."""
    for part in parts:
        inner = [other for other in parts if other is not part and other.path.startswith(part.prefix)]
        if part.saves_itself or (inner and type(part.optimizer) is not Together):
            return type(part.optimizer).__name__
    found = task_state.find(task_state.roots[0])
    if found.modules or found.stateful or any(isinstance(one, (Tensor, np.ndarray)) for one in found.loose.values()):
        return type(parts[-1].optimizer).__name__
    return None


@dataclass(frozen=True)
class OwnRows:
    """Rows of a parameter that this rank updates."""

    piece: RowRange
    parameter: Parameter
    """A view of these rows, which the optimizer has in place of the whole parameter."""


def parameter_of(whole: Parameter, piece: RowRange) -> Parameter:
    """A parameter that shares the memory of these rows of another one, and has its attributes."""
    part = Parameter(piece.of(whole.data))
    part.__dict__.update(vars(whole))
    return part


def replace_parameters(optimizer: Optimizer, group: dict[str, object], mine: Mapping[int, OwnRows | None]) -> None:
    """Replaces an optimizer's whole parameters by this rank's rows, together with existing state."""
    wholes = group["params"]
    assert isinstance(wholes, list), "of an optimizer"
    kept: list[tuple[int, Tensor]] = []
    for index, whole in enumerate(wholes):
        rows = mine.get(id(whole))
        if id(whole) not in mine:  # it requires no gradient
            kept.append((index, whole))
            continue
        slots = optimizer.state.pop(whole, None)
        if rows is not None:
            kept.append((index, rows.parameter))
            if slots:
                optimizer.state[rows.parameter] = {name: own_rows(slot, whole, rows) for name, slot in slots.items()}
    if isinstance(labels := group.get("param_names"), list):
        group["param_names"] = [labels[index] for index, _ in kept]
    group["params"] = [parameter for _, parameter in kept]


def shard_optimizers(optimizers: Sequence[Optimizer], mine: Mapping[int, OwnRows | None]) -> None:
    """Gives optimizers this rank's rows in place of whole parameters; from then on they take no others."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            replace_parameters(optimizer, group, mine)
        optimizer.add_param_group = refuse_group  # type: ignore[assignment, method-assign]


def refuse_group(group: Mapping[str, Any]) -> None:
    """In place of an optimizer's ``add_param_group``."""
    raise UserError(
        "an optimizer was given parameters after the run had begun, when parallel.shard had sharded its own",
        "give it all parameters when the task is made (a schedule with a factor for each group lets some wait), "
        "or leave parallel.shard out",
    )


def own_rows(slot: object, whole: Parameter, rows: OwnRows) -> object:
    """This rank's rows of a slot with the shape of the parameter; other slots unchanged."""
    if isinstance(slot, Tensor) and slot.shape == whole.shape:
        return rows.piece.of(slot).clone(memory_format=torch.preserve_format)
    return slot
