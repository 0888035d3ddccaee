"""Combines a task's models into one, assigns parameters to its optimizers, and finds those with sparse gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Embedding, EmbeddingBag, Module, Parameter
from torch.optim import SGD, Adagrad, SparseAdam

from hpctrain.backends.torch.state.optimizer import OptimizerPart, Together
from hpctrain.errors import UserError, kind_of
from hpctrain.tasks.definition import TorchTask

ONLY = ""
"""Name of the optimizer of a task with a single one."""


@dataclass(frozen=True)
class Share:
    """The parameters of one optimizer that require gradients, in the model's order."""

    pairs: Sequence[tuple[str, Parameter]]

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Names and parameters, as from a module."""
        return iter(self.pairs)

    def those_of(self, parameters: Sequence[Parameter]) -> list[Parameter]:
        """Filters the parameters that belong to this share."""
        own = {id(parameter) for _, parameter in self.pairs}
        return [parameter for parameter in parameters if id(parameter) in own]


def whole_model(task: TorchTask) -> torch.nn.Module:
    """Combines a task's models into one, in which parameter names start with the model's name. Raises UserError."""
    if not isinstance(task.model, Mapping):
        model: torch.nn.Module = task.model
        return model
    for name, model in task.model.items():
        if not isinstance(name, str) or not name.isidentifier() or hasattr(torch.nn.ModuleDict, name):
            raise UserError(f"a model cannot have the name {name!r}", "choose one such as generator")
        if not isinstance(model, torch.nn.Module):
            raise UserError(f"model[{name!r}] of the task is {kind_of(model)}", "give torch.nn.Module objects")
    return torch.nn.ModuleDict(task.model)


def shares_of(task: TorchTask, model: torch.nn.Module, parts: Sequence[OptimizerPart]) -> dict[str, Share]:
    """Parameters by optimizer; a single optimizer gets all that require gradients.

    Args:
        task: the task.
        model: its models as one.
        parts: all optimizers, including wrapped ones.

    Raises:
        UserError: an optimizer trains nothing, or two train the same parameter.
    """
    wanting = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not isinstance(task.optimizer, Mapping):
        return {ONLY: Share(wanting)}
    owner: dict[int, str] = {}
    for name in task.optimizer:
        own = [part.optimizer for part in parts if f"{part.path}.".startswith(f"{name}.")]
        groups = [group for optimizer in own for group in optimizer.param_groups]
        for parameter in {id(each): each for group in groups for each in group["params"]}.values():
            other = owner.setdefault(id(parameter), name)
            if other != name:
                shared = next(path for path, each in model.named_parameters() if each is parameter)
                raise UserError(
                    f"both optimizer[{other!r}] and optimizer[{name!r}] of the task update {shared}",
                    "give each parameter to one optimizer",
                )
    shares = {
        name: Share([(own, each) for own, each in wanting if owner.get(id(each)) == name]) for name in task.optimizer
    }
    idle = [name for name, share in shares.items() if not share.pairs]
    if idle:
        raise UserError(
            f"optimizer[{idle[0]!r}] of the task has no parameter that requires a gradient",
            "make it from the parameters of one of the task's models, and leave their requires_grad on",
        )
    return shares


def sparse_parameters(model: Module, parts: Sequence[OptimizerPart], mode: str) -> list[Parameter]:
    """Embedding tables with ``sparse=True`` whose optimizers treat missing rows like zero gradients; and all parameters
    of SparseAdam, which takes nothing else.

    Args:
        model: the task's model.
        parts: the task's optimizers.
        mode: ``reduce.sparse``.

    Raises:
        UserError: SparseAdam updates a parameter that is not a table.
    """
    tables = {
        id(module._parameters.get("weight"))
        for module in model.modules()
        if isinstance(module, (Embedding, EmbeddingBag)) and module.sparse
    }
    found = []
    updating = [part for part in parts if type(part.optimizer) is not Together]  # a wrapper that updates nothing itself
    for name, parameter in model.named_parameters():
        holders = [(part.optimizer, group) for part in updating for group in holding(part, parameter)]
        needed = any(isinstance(optimizer, SparseAdam) for optimizer, _ in holders)
        if needed and parameter.ndim != 2:
            raise UserError(
                f"SparseAdam updates {name}, which has {parameter.ndim} axes",
                "give it the tables of embeddings alone: optimizer=[SparseAdam(tables), Adam(rest)]",
            )
        updates_rows = bool(holders) and all(updates_rows_alone(*holder) for holder in holders)
        if parameter.requires_grad and mode == "auto" and (needed or (id(parameter) in tables and updates_rows)):
            found.append(parameter)
    return found


def of_sparse_adam(model: Module, parts: Sequence[OptimizerPart]) -> Iterator[str]:
    """Names of the parameters that SparseAdam updates."""
    own = [part.optimizer for part in parts if isinstance(part.optimizer, SparseAdam)]
    updated = {id(one) for optimizer in own for group in optimizer.param_groups for one in group["params"]}
    return (name for name, one in model.named_parameters() if id(one) in updated)


def holding(part: OptimizerPart, parameter: Parameter) -> Iterator[dict[str, Any]]:
    """Parameter groups of an optimizer that contain a parameter."""
    return (group for group in part.optimizer.param_groups if any(one is parameter for one in group["params"]))


def updates_rows_alone(optimizer: Any, group: dict[str, Any]) -> bool:
    """Whether a row with a zero gradient would not change, so that it may be left out."""
    if group.get("weight_decay") or group.get("fused"):
        return False
    return type(optimizer) in (SparseAdam, Adagrad) or (type(optimizer) is SGD and not group.get("momentum"))
