"""A float64 PyTorch model and many optimizers, to be trained with and without sharded state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn import functional

from hpctrain.tasks.definition import TorchTask
from tests.support.checkpoint_data import augment, data


class Lion(optim.Optimizer):
    """A custom optimizer that follows the sign of a momentum (Chen et al. 2023)."""

    elementwise = True

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update each element independently."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(torch.lerp(parameter.grad, momentum, 0.9).sign_(), alpha=-group["lr"])
                momentum.lerp_(parameter.grad, 0.01)


class Lamb(optim.Optimizer):
    """A custom optimizer with steps scaled by the whole tensor's norm (You et al. 2020, without the moments)."""

    elementwise = False

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update each tensor as a whole."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter]["norm"] = float(parameter.norm())
                    update = parameter.grad + group["weight_decay"] * parameter
                    parameter.add_(update, alpha=-group["lr"] * float(parameter.norm() / (update.norm() + 1e-9)))


def model() -> nn.Module:
    """A model with layers whose sizes do not divide evenly, one of them a convolution, and a scalar parameter."""
    return Scaled().double()


class Scaled(nn.Module):
    """A classifier of points, with an unused and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Linear(12, 31), nn.Tanh(), nn.Unflatten(1, (1, 31)), nn.Conv1d(1, 3, 5), nn.Flatten()),
            *(nn.Linear(81, 7), nn.ReLU(), nn.Linear(7, 3)),
        )
        self.scale = nn.Parameter(torch.ones(()))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(5, 2))

    def forward(self, points: Tensor) -> Tensor:
        """[n, 3]."""
        logits: Tensor = self.layers(points) * self.scale * self.frozen
        return logits


def groups(made: nn.Module, **settings: Any) -> list[dict[str, Any]]:
    """Parameter groups for matrices and the rest, with different learning rates and weight decay."""
    matrices = [each for each in made.parameters() if each.ndim > 1]
    rest = [each for each in made.parameters() if each.ndim < 2]
    return [{"params": matrices, "weight_decay": 0.1} | settings, {"params": rest, "lr": 0.02} | settings]


def by_group(kind: Callable[..., optim.Optimizer], **settings: Any) -> Callable[[nn.Module], Any]:
    """Return a function that makes an optimizer with two groups."""
    return lambda made: kind(groups(made), lr=0.01, **settings)


def rprop(made: nn.Module) -> optim.Optimizer:
    """Rprop, which has no weight decay and so gets no groups."""
    return optim.Rprop(made.parameters(), lr=0.01)


def muon(made: nn.Module) -> Any:
    """Muon as intended: for matrices, with AdamW for the rest."""
    matrices = [each for each in made.parameters() if each.ndim == 2]
    return [optim.Muon(matrices, lr=0.01), optim.AdamW([each for each in made.parameters() if each.ndim != 2], lr=0.01)]


BY_ROWS: dict[str, Callable[[nn.Module], Any]] = {
    "SGD": by_group(optim.SGD, momentum=0.9, nesterov=True),
    "Adam": by_group(optim.Adam, amsgrad=True),
    "AdamW": by_group(optim.AdamW),
    "Adamax": by_group(optim.Adamax),
    "NAdam": by_group(optim.NAdam),
    "RAdam": by_group(optim.RAdam),
    "RMSprop": by_group(optim.RMSprop, momentum=0.5, centered=True),
    "Rprop": rprop,
    "Adagrad": by_group(optim.Adagrad, initial_accumulator_value=0.1),
    "Adadelta": by_group(optim.Adadelta),
    "ASGD": by_group(optim.ASGD),
    "Lion of a user": by_group(Lion),
}
"""Optimizers that update each element independently."""
WHOLE: dict[str, Callable[[nn.Module], Any]] = {
    "Adafactor": by_group(optim.Adafactor),
    "Muon": muon,
    "Lamb of a user": by_group(Lamb),
}
"""Optimizers that need whole tensors."""
SOME = ("SGD", "AdamW", "Lion of a user", "Muon")
"""Optimizers also tried on two ranks."""


def task() -> TorchTask:
    """A task for ``fit``, in which nothing depends on the rank."""
    torch.manual_seed(3)
    made = model()
    return TorchTask(
        made,
        lambda outputs, batch: functional.cross_entropy(outputs, batch["y"]),
        BY_ROWS["AdamW"](made),
        data(),
        forward=lambda own, batch: own(batch["x"].double()),
        transform=augment,
    )
