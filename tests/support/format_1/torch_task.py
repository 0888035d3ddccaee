"""The task of the run folder ``torch`` beside this file."""

import numpy as np
import torch

from hpctrain import TorchTask


def task() -> TorchTask:
    x = np.linspace(-3, 3, 64, dtype=np.float32)[:, None]
    model = torch.nn.Sequential(torch.nn.Linear(1, 6), torch.nn.BatchNorm1d(6), torch.nn.Tanh(), torch.nn.Linear(6, 1))
    return TorchTask(
        model=model,
        loss=lambda output, batch: torch.nn.functional.mse_loss(output, batch["y"]),
        optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
        train={"x": x, "y": np.sin(x)},
    )
