"""Combines a task's models into one, and assigns their parameters to its optimizers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn import Parameter

from hpctrain.backends.torch.state.optimizer import Part
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


def shares_of(task: TorchTask, model: torch.nn.Module, parts: Sequence[Part]) -> dict[str, Share]:
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
        groups = [
            group
            for part in parts
            for group in part.optimizer.param_groups
            if part.path == name or part.path.startswith(f"{name}.")
        ]
        for parameter in {id(each): each for group in groups for each in group["params"]}.values():
            other = owner.setdefault(id(parameter), name)
            if other != name:
                shared = next(own for own, each in model.named_parameters() if each is parameter)
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
