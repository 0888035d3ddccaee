"""Selects the parameters of a torch task whose gradients stay sparse."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch.nn import Embedding, EmbeddingBag, Module, Parameter
from torch.optim import SGD, Adagrad, SparseAdam

from hpctrain.backends.torch.state.optimizer import Part, Together
from hpctrain.errors import UserError


def sparse_parameters(model: Module, parts: Sequence[Part], mode: str) -> list[Parameter]:
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
        id(module._parameters["weight"])
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


def of_sparse_adam(model: Module, parts: Sequence[Part]) -> Iterator[str]:
    """Names of the parameters that SparseAdam updates."""
    own = [part for part in parts if isinstance(part.optimizer, SparseAdam)]
    return (name for name, one in model.named_parameters() if any(True for part in own for _ in holding(part, one)))


def holding(part: Part, parameter: Parameter) -> Iterator[dict[str, Any]]:
    """Parameter groups of an optimizer that contain a parameter."""
    return (group for group in part.optimizer.param_groups if any(one is parameter for one in group["params"]))


def updates_rows_alone(optimizer: Any, group: dict[str, Any]) -> bool:
    """Whether a row with a zero gradient would not change, so that it may be left out."""
    if group.get("weight_decay") or group.get("fused"):
        return False
    return type(optimizer) in (SparseAdam, Adagrad) or (type(optimizer) is SGD and not group.get("momentum"))
