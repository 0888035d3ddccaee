"""A task whose steps take a given time, always or until a file exists."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpctrain import TorchTask


def rows() -> dict[str, Any]:
    """Rows of four numbers, and their sums."""
    x = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    return {"x": x, "y": x.sum(axis=1, keepdims=True)}


def task(step_s: float = 0.02, until: str = "", data: str = "") -> TorchTask:
    """Linear regression with slow steps; ``data`` replaces the rows."""
    given = data or rows()
    model = torch.nn.Linear(4, 1)

    def loss(output: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
        if not (until and Path(until).exists()):
            time.sleep(step_s)  # the work of a step
        return torch.nn.functional.mse_loss(output, batch["y"])

    return TorchTask(
        model=model, loss=loss, optimizer=torch.optim.SGD(model.parameters(), lr=0.01), train=given, validation=given
    )
