"""What of a task cannot be trained, in sentences, before the first step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import Embedding, EmbeddingBag
from torch.nn.parameter import UninitializedParameter

from hpctrain.backends.torch.reduce.gradients import watched
from hpctrain.backends.torch.reduce.sparse_parameters import of_sparse_adam
from hpctrain.backends.torch.state.optimizer import Part
from hpctrain.config.combinations import Feature, used
from hpctrain.errors import UserError


def require_trainable(model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raises UserError if a model cannot be trained by one backward pass and one step of optimizers an update."""
    own = set()
    for name, parameter in model.named_parameters():
        own.add(id(parameter))
        if isinstance(parameter, UninitializedParameter):
            raise UserError(
                f"parameter {name} has no shape yet, since its layer is a lazy one",
                "pass an example batch through the model before the task returns it",
            )
    if not optimizers:
        raise UserError(
            "the task's optimizer neither is nor holds a torch.optim.Optimizer", "derive it from torch.optim.Optimizer"
        )
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    if any(id(parameter) not in own for group in groups for parameter in group["params"]):
        raise UserError(
            "the optimizer updates tensors that are not parameters of the task's model",
            "make it from model.parameters() of the model that the task returns",
        )
    if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in optimizers):
        raise UserError(
            "LBFGS evaluates the loss several times an update, which a step over several ranks does once",
            "use an optimizer whose step needs no closure, such as AdamW",
        )


def has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether something is called before or after each step."""
    known = vars(optimizer)
    return any(known.get(f"_optimizer_step_{when}_hooks") for when in ("pre", "post"))


def model_features(
    model: torch.nn.Module, parts: Sequence[Part], joins: bool, ranks: int, unsuited: str | None = None
) -> dict[Feature, Any]:
    """What a model and its optimizers use.

    Args:
        model: all of the task's as one.
        parts: its optimizers.
        joins: whether BatchNorm layers are to normalise over all ranks.
        ranks: that the model is trained on.
        unsuited: kind of an optimizer with unusual state.
    """
    volumes = [name for name, parameter in model.named_parameters() if parameter.ndim == 5]
    compiled = [name or "the model" for name, module in model.named_modules() if is_compiled(module)]
    types = {str(one.dtype).removeprefix("torch.") for one in model.parameters() if one.requires_grad}
    half = [one for one in model.parameters() if one.requires_grad and one.dtype.itemsize < 4]
    tables = (Embedding, EmbeddingBag)
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, tables)]
    given = {
        Feature.COMPILED_MODEL: next(iter(compiled), None),
        Feature.HALF_PARAMETERS: bool(half),
        Feature.JOINT_LAYERS: joins and "a layer of the model",
        Feature.MAX_NORM: next((name for name, table in found if table.max_norm is not None), None),
        Feature.MIXED_PARAMETERS: len(types) > 1 and " and ".join(sorted(types)),
        Feature.OWN_OPTIMIZER_STATE: unsuited,
        Feature.PARAMETER_HOOKS: next((name for name, one in model.named_parameters() if watched(one)), None),
        Feature.RANKS: ranks > 1 and ranks,
        Feature.SPARSE_ADAM: next(of_sparse_adam(model, parts), None),
        Feature.SPARSE_ROWS: next((name for name, table in found if table.sparse), None),
        Feature.STEP_HOOKS: next((type(part.optimizer).__name__ for part in parts if has_hooks(part.optimizer)), None),
        Feature.VOLUMES: next(iter(volumes), None),
    }
    return used(given)


def is_compiled(module: torch.nn.Module) -> bool:
    """By the task: what such a part calls is not seen."""
    by_itself = isinstance(module, torch.jit.ScriptModule) or type(module).__name__ == "OptimizedModule"
    return by_itself or module._compiled_call_impl is not None


def require_scalar(loss: torch.Tensor) -> None:
    """Raises UserError if a loss is one value a sample."""
    if loss.numel() != 1:
        raise UserError(
            f"the loss has shape {list(loss.shape)}",
            "return its mean over the samples, a scalar, or (sum, weight), two scalars",
        )
