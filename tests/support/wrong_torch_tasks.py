"""Tasks as beginners write them, each with one mistake, in PyTorch."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from hpctrain.tasks.definition import TorchTask


class NoForward(nn.Module):
    """Its forward is called otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)


class NoReturn(nn.Module):
    """Forgets to return."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> None:
        """The layer's outputs, thrown away."""
        self.layer(x)


def swapped(batch: Any, outputs: Any) -> Any:
    """Arguments in the other order."""
    return functional.cross_entropy(outputs, batch["y"])


def forgets(outputs: Any, batch: Any) -> None:
    """No return."""
    functional.cross_entropy(outputs, batch["y"])


def broken_metric(outputs: Any, batch: Any) -> Any:
    """A name that is not in the batch."""
    return (outputs.argmax(1) == batch["label"]).float().mean()


def loss(outputs: Any, batch: Any) -> Any:
    """As it should be."""
    return functional.cross_entropy(outputs, batch["y"])


def made(**changes: Any) -> TorchTask:
    """A task that works, but for the changes."""
    random = np.random.default_rng(3)
    data = {"x": random.normal(size=(40, 4)).astype(np.float32), "y": random.integers(0, 3, 40)}
    model = changes.pop("model", None) or nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if isinstance(model, nn.Module) else None
    return dataclasses.replace(TorchTask(model, loss, optimizer, data, data), **changes)


def three() -> dict[str, Any]:
    """Samples with three arrays."""
    x = np.ones((40, 4), np.float32)
    return {"x": x, "y": x[:, 0], "w": x[:, 0]}


def column() -> dict[str, Any]:
    """Targets of one number, where outputs have shape [n, 1]."""
    x = np.ones((40, 4), np.float32)
    return {"x": x, "y": x[:, 0]}


WRONG: dict[str, Any] = {
    "no_forward": lambda: made(model=NoForward()),
    "no_return": lambda: made(model=NoReturn()),
    "wide": lambda: made(model=nn.Linear(5, 3)),
    "swapped": lambda: made(loss=swapped),
    "forgets": lambda: made(loss=forgets),
    "each": lambda: made(loss=lambda outputs, batch: functional.cross_entropy(outputs, batch["y"], reduction="none")),
    "item": lambda: made(loss=lambda outputs, batch: loss(outputs, batch).item()),
    "argmax": lambda: made(loss=lambda outputs, batch: (outputs.argmax(1) != batch["y"]).float().mean()),
    "name": lambda: made(loss="cross_entrpy"),
    "class": lambda: made(loss=nn.CrossEntropyLoss),
    "sum": lambda: made(loss=nn.CrossEntropyLoss(reduction="sum")),
    "weighted": lambda: made(loss=nn.CrossEntropyLoss(torch.ones(3))),
    "three_arrays": lambda: made(loss="mse", train=three()),
    "broadcast": lambda: made(model=nn.Linear(4, 1), loss="mse", train=column(), validation=None),
    "number": lambda: made(loss=3),
    "metric": lambda: made(metrics={"accuracy": broken_metric}),
    "metric_class": lambda: made(metrics={"accuracy": nn.L1Loss}),
    "metric_of_samples": lambda: made(metrics={"wrong": lambda outputs, batch: outputs.argmax(1) != batch["y"]}),
    "optimizer_class": lambda: made(optimizer=torch.optim.Adam),
    "model_class": lambda: dataclasses.replace(made(), model=NoForward),
}
RIGHT: dict[str, Any] = {
    "cross_entropy": lambda: made(loss="cross_entropy"),
    "object": lambda: made(loss=nn.CrossEntropyLoss()),
    "function": lambda: made(loss=functional.cross_entropy),
    "own": made,
}


def task(which: str) -> TorchTask:
    """One of them."""
    made: TorchTask = (WRONG | RIGHT)[which]()
    return made
