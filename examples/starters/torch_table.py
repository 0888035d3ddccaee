"""Regression on the columns of a table with PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from hpctrain import TorchTask

COLUMNS = 8


def rows(samples: int, seed: int) -> dict[str, np.ndarray[Any, Any]]:
    """Synthetic rows of a table, and a number to predict; replace them with your own.

    May return arrays with a leading sample axis, or the path of an HDF5 file that ``hpctrain data pack`` made from CSV
    or Parquet.
    """
    random = np.random.default_rng(seed)
    columns = random.normal(size=(samples, COLUMNS)).astype(np.float32)
    value = columns[:, 0] * columns[:, 1] + np.sin(columns[:, 2])
    return {"columns": columns, "value": value[:, None]}


def error(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Mean absolute error."""
    return (output - batch["value"]).abs().mean()


def task(width: int = 64, lr: float = 3e-3) -> TorchTask:
    """Build the task; ``task_args`` in the run file sets the arguments."""
    model = nn.Sequential(nn.Linear(COLUMNS, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))
    return TorchTask(
        model=model,
        loss="mse",  # or a function(output, batch) of your own
        optimizer=torch.optim.AdamW(model.parameters(), lr=lr),
        train=rows(2000, seed=1),
        validation=rows(400, seed=2),
        metrics={"error": error},
    )
