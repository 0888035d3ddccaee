"""A PyTorch task whose training metrics NumPy can compute."""

from __future__ import annotations

import torch
from torch import nn

from hpctrain.tasks.definition import TorchTask, columns, rows
from tests.tasks.metered_data import CLASSES, FIRST, HIDDEN, INPUTS, SECOND, Median, X, Y, largest
from tests.tasks.torch_metrics import Hits


def task(lr: float = 0.0, has_library: bool = True) -> TorchTask:
    """The task; ``has_library``: with a metric that has the interface of torchmetrics."""
    model = nn.Sequential(nn.Linear(INPUTS, HIDDEN, bias=False), nn.Tanh(), nn.Linear(HIDDEN, CLASSES, bias=False))
    with torch.no_grad():
        for layer, values in ((model[0], FIRST), (model[2], SECOND)):
            layer.weight.copy_(torch.from_numpy(values.T))
    metrics = {
        "share": lambda outputs, batch: (outputs.argmax(1) == batch["y"]).float().mean(),
        "largest": largest,
        "median": Median(),
        **({"hits": Hits()} if has_library else {}),
    }
    return TorchTask(
        model,
        "cross_entropy",
        torch.optim.SGD(model.parameters(), lr),
        train={"x": X, "y": Y},
        validation={"x": X, "y": Y},
        metrics=metrics,
        tensor={"0": columns, "2": rows},
    )
