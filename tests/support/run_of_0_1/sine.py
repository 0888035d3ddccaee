"""The task of the run folder beside this file."""

import numpy as np
import torch

from hpctrain import TorchTask


def task() -> TorchTask:
    x = np.linspace(-3, 3, 64, dtype=np.float32)[:, None]
    data = {"x": x, "y": np.sin(x)}
    model = torch.nn.Linear(1, 1)
    return TorchTask(
        model=model,
        loss=lambda output, batch: torch.nn.functional.mse_loss(output, batch["y"]),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        train=data,
        validation=data,
    )
