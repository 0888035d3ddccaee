"""A task whose steps take a given time."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from hpctrain import TorchTask


def task(step_s: float = 0.02) -> TorchTask:
    """Linear regression that also waits."""
    x = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    data = {"x": x, "y": x.sum(axis=1, keepdims=True)}
    model = torch.nn.Linear(4, 1)

    def loss(output: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
        time.sleep(step_s)  # the work of a step
        return torch.nn.functional.mse_loss(output, batch["y"])

    return TorchTask(
        model=model, loss=loss, optimizer=torch.optim.SGD(model.parameters(), lr=0.01), train=data, validation=data
    )
