"""A torch task with dropout, batch normalisation, augmentation, and random numbers from everywhere."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from hpctrain.comm.world import World
from hpctrain.tasks.definition import TorchTask
from tests.support.checkpoint_data import augment, data, global_noise


def loss(logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Cross-entropy, with noise."""
    return functional.cross_entropy(logits, batch["y"]) * (global_noise() if logits.requires_grad else 1)


def task(optimizer: str = "adam") -> TorchTask:
    """The task."""
    model = nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 3))
    make = {"adam": torch.optim.AdamW, "momentum": lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9, nesterov=True)}
    return TorchTask(model, loss, make[optimizer](model.parameters(), lr=0.01), data(), data(40), transform=augment)


def plain() -> TorchTask:
    """Without per-rank noise or statistics."""
    model = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 3))
    return TorchTask(
        model,
        lambda logits, batch: functional.cross_entropy(logits, batch["y"]),
        torch.optim.Adam(model.parameters(), lr=0.01),
        data(),
        transform=augment,
    )


def unequal(world: World) -> TorchTask:
    """Weights that another rank overwrites behind everybody's back."""
    made = plain()

    def overwrite(module: nn.Module, inputs: object, outputs: object) -> None:
        made.model[0].bias.data.add_(1)

    if world.rank == 1:
        made.model.register_forward_hook(overwrite)
    return made
