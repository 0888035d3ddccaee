"""Image classification with PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from hpctrain import TorchTask

CLASSES = 4


def images(samples: int, seed: int) -> dict[str, np.ndarray[Any, Any]]:
    """Synthetic images with a bright spot in one of four corners; replace them with your own.

    May return arrays with a leading sample axis, the path of an HDF5 file made by ``hpctrain data pack``, or a Dataset.
    """
    random = np.random.default_rng(seed)
    label = random.integers(0, CLASSES, samples)
    image = random.normal(0, 0.5, (samples, 16, 16)).astype(np.float32)
    for number, corner in enumerate(label):
        row, column = 8 * (corner // 2), 8 * (corner % 2)
        image[number, row + 2 : row + 6, column + 2 : column + 6] += 1
    return {"image": image[:, None], "label": label}


def accuracy(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Fraction of correct predictions."""
    return (output.argmax(1) == batch["label"]).float().mean()


def task(width: int = 8, lr: float = 3e-3) -> TorchTask:
    """Build the task; ``task_args`` in the run file sets the arguments."""
    model = nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(32 * width, CLASSES),
    )
    return TorchTask(
        model=model,
        loss="cross_entropy",  # or a function(output, batch) of your own
        optimizer=torch.optim.AdamW(model.parameters(), lr=lr),
        train=images(2000, seed=1),
        validation=images(400, seed=2),
        metrics={"accuracy": accuracy},
    )
