"""A task with activations too large for glibc to keep by default; it records the page faults of its steps."""

from __future__ import annotations

import resource
from pathlib import Path

import numpy as np
import torch

from hpctrain import BaseHook, TorchTask, Training, World

ROWS, UNITS = 1024, 16384
"""Shape of the activations: 64 MiB."""


class Faults(BaseHook):
    """Appends the process's total page faults to a file after each step."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def after_step(self, training: Training, result: object) -> None:
        """Write a line."""
        with self.path.open("a") as file:
            file.write(f"{resource.getrusage(resource.RUSAGE_SELF).ru_minflt}\n")


def task(world: World, folder: str) -> TorchTask:
    """Regression with one wide layer."""
    x = np.random.default_rng(0).normal(size=(ROWS, 1)).astype(np.float32)
    model = torch.nn.Sequential(torch.nn.Linear(1, UNITS), torch.nn.GELU(), torch.nn.Linear(UNITS, 1))
    return TorchTask(
        model=model,
        loss=lambda output, batch: torch.nn.functional.mse_loss(output, batch["y"]),
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
        train={"x": x, "y": np.sin(x)},
        hooks=[Faults(Path(folder) / "faults")],
    )
