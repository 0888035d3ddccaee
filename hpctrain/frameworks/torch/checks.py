"""What of a task cannot be trained, in sentences, before the first step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.parameter import UninitializedParameter

from hpctrain.errors import UserError


def require_trainable(
    model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], channels_last: bool, averages: bool
) -> None:
    """Raises UserError if a model cannot be trained by one backward pass and one step of optimizers an update."""
    own = set()
    for name, parameter in model.named_parameters():
        own.add(id(parameter))
        if isinstance(parameter, UninitializedParameter):
            raise UserError(
                f"parameter {name} has no shape yet, since its layer is a lazy one",
                "pass an example batch through the model before the task returns it",
            )
        if channels_last and parameter.ndim == 5:
            raise UserError(
                f"train.channels_last is for images, and parameter {name} has 5 dimensions",
                "leave train.channels_last out",
            )
    if not optimizers:
        raise UserError(
            "the task's optimizer neither is nor holds a torch.optim.Optimizer",
            "derive it from torch.optim.Optimizer",
        )
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    if any(id(parameter) not in own for group in groups for parameter in group["params"]):
        raise UserError(
            "the optimizer updates tensors that are not parameters of the task's model",
            "make it from model.parameters() of the model that the task returns",
        )
    if averages and any(parameter.requires_grad and parameter.dtype.itemsize < 4 for parameter in model.parameters()):
        raise UserError(
            "train.ema_decay is given, but the model's parameters have 16 bits, which hold no slow average",
            "keep the parameters in float32: train.precision computes in 16 bits",
        )
    if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in optimizers):
        raise UserError(
            "LBFGS evaluates the loss several times an update, which a step over several ranks does once",
            "use an optimizer whose step needs no closure, such as AdamW",
        )


def require_scalar(loss: Tensor) -> None:
    """Raises UserError if a loss is one value a sample."""
    if loss.numel() != 1:
        raise UserError(
            f"the loss has shape {list(loss.shape)}",
            "return its mean over the samples, a scalar, or (sum, weight), two scalars",
        )
