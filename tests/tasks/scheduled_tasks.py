"""PyTorch tasks with their own learning rate schedule."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.optim import lr_scheduler as schedulers

from hpctrain.tasks.definition import TorchScheduler, TorchTask

MAKERS: dict[str, TorchScheduler] = {
    "one_cycle": TorchScheduler(lambda optimizer: schedulers.OneCycleLR(optimizer, max_lr=0.1, total_steps=40)),
    "ends_by_step_3": TorchScheduler(lambda optimizer: schedulers.OneCycleLR(optimizer, max_lr=0.1, total_steps=3)),
    "sequential": TorchScheduler(
        lambda optimizer: schedulers.SequentialLR(
            optimizer,
            [
                schedulers.LinearLR(optimizer, 0.1, total_iters=3),
                schedulers.MultiStepLR(optimizer, [6, 12], gamma=0.3),
            ],
            milestones=[9],
        )
    ),
    "exponential": TorchScheduler(lambda optimizer: schedulers.ExponentialLR(optimizer, 0.7), every="epoch"),
    "plateau": TorchScheduler(
        lambda optimizer: schedulers.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5),
        every="evaluation",
    ),
    "groups": TorchScheduler(
        lambda optimizer: schedulers.LambdaLR(optimizer, [lambda step: 0.9**step, lambda step: 1.0])
    ),
    "not_one": TorchScheduler(lambda optimizer: 3),
    "plateau_by_step": TorchScheduler(schedulers.ReduceLROnPlateau),
}
FUNCTIONS: dict[str, Any] = {
    "function": lambda step: 1 / (1 + step),
    "function_of_groups": lambda step: (0.9**step, 0.0),
    "too_few_factors": lambda step: [1.0],
}


def task(schedule: str = "") -> TorchTask:
    """A task with two parameter groups at different learning rates."""
    random = np.random.default_rng(3)
    x = random.normal(size=(40, 4)).astype(np.float32)
    data = {"x": x, "y": x.sum(1, keepdims=True)}
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    groups = [{"params": model[0].parameters(), "lr": 0.02}, {"params": model[2].parameters(), "lr": 0.01}]
    return TorchTask(
        model,
        lambda output, batch: functional.mse_loss(output, batch["y"]),
        torch.optim.AdamW(groups),
        data,
        data,
        schedule=MAKERS.get(schedule) or FUNCTIONS.get(schedule),
    )
