"""A task that records which samples each rank trains on."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch

from hpctrain import TorchTask, World


def task(world: World, folder: str, samples: int = 53) -> TorchTask:
    """Linear regression on samples with an ``id``."""
    x = np.random.default_rng(0).normal(size=(samples, 4)).astype(np.float32)
    data = {"x": x, "y": x.sum(axis=1, keepdims=True), "id": np.arange(samples)}
    model = torch.nn.Linear(4, 1)
    path = Path(folder) / f"seen-{world.rank}-{os.getpid()}"

    def loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        line = " ".join(map(str, batch["id"].tolist())) + "\n"

        def note(gradient: torch.Tensor) -> None:
            with open(path, "a") as file:
                file.write(line)

        if output.requires_grad:
            output.register_hook(note)  # in the backward pass, which the trial call before the first step lacks
        return torch.nn.functional.mse_loss(output, batch["y"])

    return TorchTask(model=model, loss=loss, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), train=data)
