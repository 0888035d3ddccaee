"""Handwritten digits with PyTorch: a network that reaches 98% accuracy in seconds. A template for your own tasks."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from hpctrain.tasks.definition import TorchTask
from hpctrain.tasks.digits_data import pack


class Network(nn.Module):
    """Two convolutions and two dense layers; float32[n, 1, 8, 8] -> float32[n, 10] logits."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, kernel_size=3, padding=1)
        self.dense1 = nn.Linear(32 * 2 * 2, 64)
        self.dense2 = nn.Linear(64, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Logits of the ten digits."""
        hidden = functional.max_pool2d(self.conv1(image).relu(), 2)
        hidden = functional.max_pool2d(self.conv2(hidden).relu(), 2)
        return self.dense2(self.dense1(hidden.flatten(1)).relu())


def loss(logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Mean cross-entropy."""
    return functional.cross_entropy(logits, batch["label"])


def accuracy(logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Fraction of digits recognized."""
    return (logits.argmax(1) == batch["label"]).float().mean()


def task(data: str = "data/digits", lr: float = 5e-3) -> TorchTask:
    """The task; ``data`` is the folder of its HDF5 files, which are created on first use."""
    train, validation = pack(data)
    network = Network()
    return TorchTask(
        model=network,
        loss=loss,
        optimizer=torch.optim.Adam(network.parameters(), lr=lr),
        train=train,
        validation=validation,
        metrics={"accuracy": accuracy},
    )
