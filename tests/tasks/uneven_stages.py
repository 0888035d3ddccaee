"""A chain of layers of equal size, one of which is slow, and a task around it."""

from __future__ import annotations

import itertools
import os
import time

import numpy as np
import torch
from torch import Tensor, nn

from hpctrain import TorchTask

LAYERS, WIDTH, SAMPLES, PAUSE_S = 6, 8, 12, 0.1
SLOW = "SLOW_LAYER"
"""Environment variable with the index of the slow layer."""


class Slow(nn.Module):
    """A layer that counts its forward passes and pauses in each."""

    def __init__(self, pause_s: float, dropout: float) -> None:
        super().__init__()
        self.linear, self.dropout, self.pause_s = nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout), pause_s
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        """Outputs of the same shape."""
        self.get_buffer("passes").add_(1)
        time.sleep(self.pause_s)
        return self.dropout(x + self.linear(x).tanh())


def chain(slow: int = 0, dropout: float = 0.0) -> nn.Sequential:
    """The model in float64 with fixed weights; ``slow`` is the index of the layer that pauses."""
    torch.manual_seed(4)
    return nn.Sequential(*(Slow(PAUSE_S * (number == slow), dropout) for number in range(LAYERS))).double()


def data() -> dict[str, np.ndarray]:
    """A fixed set of samples."""
    random = np.random.default_rng(5)
    return {name: random.normal(size=(SAMPLES, WIDTH)) for name in ("x", "y")}


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW over all parameters."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)


def task(dropout: float = 0.0, given: tuple[int, ...] = ()) -> TorchTask:
    """The task; ``given`` is the number of layers of each stage, and the environment tells which layer pauses."""
    model = chain(int(os.environ.get(SLOW, "0")), dropout)
    ends = list(itertools.accumulate(given, initial=0))
    layers = (lambda whole: [list(whole)[begin:end] for begin, end in itertools.pairwise(ends)]) if given else None
    return TorchTask(model, "mse", optimizer_of(model), data(), layers=layers)
