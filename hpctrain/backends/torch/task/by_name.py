"""PyTorch losses (names, objects and functions) as a task's loss, and optimizers by name."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn.modules.loss import _Loss

from hpctrain.system.user_errors import no_mean, no_such_loss, not_called, target_of

NAMES: dict[str, Callable[..., Tensor]] = {
    "mse": nn.functional.mse_loss,
    "mae": nn.functional.l1_loss,
    "huber": nn.functional.huber_loss,
    "cross_entropy": nn.functional.cross_entropy,
    "nll": nn.functional.nll_loss,
    "bce": nn.functional.binary_cross_entropy,
    "bce_with_logits": nn.functional.binary_cross_entropy_with_logits,
}


FUSED = ("sgd", "adam", "adamw")
"""Optimizers that can update in one pass over memory, on CPUs and GPUs; not with sparse gradients, nor parameters whose
device is not known yet. Cut into rows, results are the same bits."""


def of_target(function: Callable[..., Tensor], target: str, outputs: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Applies a loss(output, target) to a batch."""
    return function(outputs, batch[target])


def of_classes(sum_of: functools.partial[Tensor], target: str, outputs: Tensor, batch: Mapping[str, Tensor]) -> Any:
    """Applies the sum of a loss of classes to a batch; returns it and the weight by which torch's mean divides it."""
    classes, options = batch[target], sum_of.keywords
    weights = options.get("weight")
    if weights is not None and weights.device != outputs.device:  # in the first call
        weights = options["weight"] = weights.to(outputs.device)
    total = sum_of(outputs.float() if outputs.dtype == torch.float16 else outputs, classes)  # sums exceed 16 bits
    if classes.is_floating_point():  # probabilities
        return total, classes.numel() / classes.shape[1]
    counts = classes != options.get("ignore_index", -100)
    if weights is not None:
        counts = weights[classes * counts] * counts
    return total, counts.sum()


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
        return weighing(NAMES[given], target_of(fields, repr(given)))
    if isinstance(given, type) and issubclass(given, nn.Module):
        raise not_called(given.__name__)
    if isinstance(given, _Loss) and type(given).__module__.startswith("torch."):
        if given.reduction != "mean":
            raise no_mean(type(given).__name__)
        return weighing(given, target_of(fields, type(given).__name__))
    if isinstance(given, types.FunctionType) and given.__module__ == nn.functional.__name__:
        return weighing(given, target_of(fields, given.__name__))
    return given


def weighing(function: Any, target: str) -> Any:
    """Makes a loss(outputs, batch) of a loss(output, target), whose weight is what counts if targets are classes."""
    options = {"reduction": "sum"}
    if isinstance(function, (nn.CrossEntropyLoss, nn.NLLLoss)):
        known = ("weight", "ignore_index", "label_smoothing")
        options |= {name: getattr(function, name) for name in known if hasattr(function, name)}
        function = next(one for kind, one in CLASSES.items() if isinstance(function, kind))
    if function not in CLASSES.values():
        return functools.partial(of_target, function, target)
    return functools.partial(of_classes, functools.partial(function, **options), target)


CLASSES = {nn.CrossEntropyLoss: nn.functional.cross_entropy, nn.NLLLoss: nn.functional.nll_loss}
"""Losses of classes, as objects and as functions."""


def make_optimizer(name: str, options: Mapping[str, Any], model: Any) -> optim.Optimizer | None:
    """Makes an optimizer of all trained parameters; None if the model is not a module, which is reported elsewhere."""
    if not isinstance(model, nn.Module):
        return None
    given = dict(options)
    if name == "rmsprop" and "rho" in given:
        given["alpha"] = given.pop("rho")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    (kind,) = (vars(optim)[each] for each in optim.__all__ if each.lower() == name)
    is_dense = not any(getattr(module, "sparse", False) for module in model.modules())
    if name in FUSED and is_dense and all(one.is_floating_point() and not one.is_meta for one in trained):
        given["fused"] = True
    optimizer: optim.Optimizer = kind(trained or model.parameters(), **given)
    return optimizer
