"""A small task in PyTorch with a fault in its loss, its samples, or before it begins."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from benchmarks.failures.faults import Injection
from hpctrain import BaseHook, TorchTask, World
from hpctrain.train.hooks import Training

SAMPLES, WIDTH = 64, 3


def samples(width: int = WIDTH) -> dict[str, np.ndarray]:
    """``x`` float32 (SAMPLES, width), ``y`` float32 (SAMPLES,)."""
    x = np.random.default_rng(1).standard_normal((SAMPLES, width), dtype=np.float32)
    return {"x": x, "y": x.sum(1)}


class Samples(Dataset[dict[str, np.ndarray]]):
    """The same as a ``Dataset``, one of whose samples has the fault."""

    def __init__(self, injection: Injection) -> None:
        self.arrays, self.injection = samples(), injection

    def __len__(self) -> int:
        """Number of samples."""
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """One sample."""
        self.injection.due()
        return {name: array[index] for name, array in self.arrays.items()}


class Begins(BaseHook):
    """Notes that training begins: the loss is called before, too, by the trial step."""

    begun = False

    def before_fit(self, training: Training) -> None:
        """See ``Hook``."""
        self.begun = True


def task(
    world: World, fault: str = "", rank: int = 0, step: int = 0, place: str = "loss", data: str = "", lr: float = 0.01,
    step_s: float = 0.05,
) -> TorchTask:  # fmt: skip
    """Makes the task.

    Args:
        world: the ranks.
        fault: name of the fault, see ``faults``.
        rank: who has it.
        step: when, from 1.
        place: ``task`` (before training), ``loss`` or ``sample``.
        data: a file instead of samples in memory, or ``wide``, or ``nan`` for a sample that is not a number.
        lr: the learning rate.
        step_s: seconds that a step takes at least.
    """
    injection = Injection(fault, world.rank == rank, 1 if place == "task" else step)
    if place == "task":
        injection.due()
    torch.manual_seed(0)
    net, begins = torch.nn.Linear(WIDTH, 1), Begins()

    def loss(outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        time.sleep(step_s if begins.begun else 0)
        factor = injection.due() if place == "loss" and begins.begun else 1.0
        return (outputs[:, 0] - batch["y"]).square().mean() * factor

    train: Any = samples(WIDTH + 1) if data == "wide" else samples()
    if data == "nan":
        train["x"][40] = np.nan
    elif data not in ("", "wide"):
        train = str(Path(data).absolute())
    elif place == "sample":
        train = Samples(injection)
    return TorchTask(net, loss, torch.optim.SGD(net.parameters(), lr=lr), train=train, hooks=[begins])
