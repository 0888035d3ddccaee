"""PyTorch losses (names, objects and functions) as a task's loss, and optimizers by name."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn, optim
from torch.nn.modules.loss import _Loss

from hpctrain.tasks.user_errors import no_mean, no_such_loss, not_called, target_of

NAMES: dict[str, Callable[..., Tensor]] = {
    "mse": nn.functional.mse_loss,
    "mae": nn.functional.l1_loss,
    "huber": nn.functional.huber_loss,
    "cross_entropy": nn.functional.cross_entropy,
    "nll": nn.functional.nll_loss,
    "bce": nn.functional.binary_cross_entropy,
    "bce_with_logits": nn.functional.binary_cross_entropy_with_logits,
}


def of_target(function: Callable[..., Tensor], target: str, outputs: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Applies a loss(output, target) to a batch."""
    return function(outputs, batch[target])


def as_loss(given: Any, fields: Sequence[str]) -> Any:
    """Converts a task's ``loss`` to a function loss(outputs, batch).

    Args:
        given: a name, a torch loss, or the user's function, which is returned unchanged.
        fields: names of a sample's arrays.

    Raises:
        UserError: the name is unknown, or the loss is not a mean over the samples.
    """
    if isinstance(given, str):
        if given not in NAMES:
            raise no_such_loss(given, sorted(NAMES))
        return functools.partial(of_target, NAMES[given], target_of(fields, repr(given)))
    if isinstance(given, type) and issubclass(given, nn.Module):
        raise not_called(given.__name__)
    if isinstance(given, _Loss) and type(given).__module__.startswith("torch."):
        weighted = isinstance(given, (nn.CrossEntropyLoss, nn.NLLLoss)) and given.weight is not None
        if given.reduction != "mean" or weighted:
            raise no_mean(type(given).__name__)
        return functools.partial(of_target, given, target_of(fields, type(given).__name__))
    if isinstance(given, types.FunctionType) and given.__module__ == nn.functional.__name__:
        return functools.partial(of_target, given, target_of(fields, given.__name__))
    return given


def make_optimizer(name: str, options: Mapping[str, Any], model: Any) -> optim.Optimizer | None:
    """Makes an optimizer of all trained parameters; None if the model is not a module, which is reported elsewhere."""
    if not isinstance(model, nn.Module):
        return None
    given = {("alpha" if (name, key) == ("rmsprop", "rho") else key): value for key, value in options.items()}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    (kind,) = (vars(optim)[each] for each in optim.__all__ if each.lower() == name)
    optimizer: optim.Optimizer = kind(trained or model.parameters(), **given)
    return optimizer
