"""Linear regression on ``x`` and ``y`` of any data that ``open_dataset`` opens."""

from __future__ import annotations

from typing import Any

import torch

from hpctrain import TorchTask


def task(data: str) -> TorchTask:
    """The task; ``data`` is used for training and validation."""
    model = torch.nn.Linear(4, 1, dtype=torch.float64)

    def loss(output: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
        return torch.nn.functional.mse_loss(output[:, 0], batch["y"])

    return TorchTask(
        model=model, loss=loss, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), train=data, validation=data
    )
