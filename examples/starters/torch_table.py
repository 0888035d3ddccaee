"""A number from the columns of a table, with PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from hpctrain import TorchTask

COLUMNS = 8


def rows(samples: int, seed: int) -> dict[str, np.ndarray[Any, Any]]:
    """Made-up rows of a table, and a number to predict; put your own in their place.

    Arrays with a leading sample axis, or a CSV or Parquet file that ``hpctrain data pack`` has made into HDF5.
    """
    random = np.random.default_rng(seed)
    columns = random.normal(size=(samples, COLUMNS)).astype(np.float32)
    value = columns[:, 0] * columns[:, 1] + np.sin(columns[:, 2])
    return {"columns": columns, "value": value[:, None]}


def error(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Mean distance to the right number."""
    return (output - batch["value"]).abs().mean()


def task(width: int = 64, lr: float = 3e-3) -> TorchTask:
    """What is trained; ``task_args`` in the run file sets the arguments."""
    model = nn.Sequential(nn.Linear(COLUMNS, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))
    return TorchTask(
        model=model,
        loss="mse",  # or a function(output, batch) of your own
        optimizer=torch.optim.AdamW(model.parameters(), lr=lr),
        train=rows(2000, seed=1),
        validation=rows(400, seed=2),
        metrics={"error": error},
    )
