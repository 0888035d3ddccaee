"""Models made on the meta device, or with values, for runs that start with weights from a file."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from hpctrain import TorchTask, columns, rows
from hpctrain.checkpoint import safetensors

PAIRS = 4


class Shifted(nn.Linear):
    """A linear layer with a buffer that is not saved."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.register_buffer("shift", torch.zeros(outputs), persistent=False)


def network(width: int, buffer: bool = False) -> nn.Sequential:
    """A model of pairs of layers, of which only the biases are trained, and a trained last layer."""
    first = Shifted if buffer else nn.Linear
    layers = [first(width, width), *(nn.Linear(width, width) for _ in range(2 * PAIRS - 1))]
    model = nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())), nn.Linear(width, 1))
    for layer in layers:
        layer.weight.requires_grad_(False)
    return model


def task(width: int = 8, meta: bool = False, buffer: bool = False, optimizer: str = "AdamW") -> TorchTask:
    """The task; with ``meta``, parameters have no values."""
    torch.manual_seed(3)
    with torch.device("meta") if meta else contextlib.nullcontext():
        model = network(width, buffer)
    made = vars(torch.optim)[optimizer]([one for one in model.parameters() if one.requires_grad], lr=1e-2)
    random = np.random.default_rng(4)
    data = {"x": random.normal(size=(8, width)).astype(np.float32), "y": np.ones((8, 1), np.float32)}
    cuts: dict[str, Any] = {f"{2 * layer}": (columns, rows)[layer % 2] for layer in range(2 * PAIRS)}
    return TorchTask(model, "mse", made, data, tensor=cuts)


def write_weights(path: Path, width: int, without: str = "") -> int:
    """Write weights for the model, optionally without one of them; return their size in bytes."""
    random = np.random.default_rng(5)
    square = random.standard_normal((width, width), np.float32) / np.float32(width**0.5)
    bias = random.standard_normal(width, np.float32)
    arrays = {f"{2 * layer}.weight": square for layer in range(2 * PAIRS)}
    arrays |= {f"{2 * layer}.bias": bias for layer in range(2 * PAIRS)}
    arrays |= {f"{4 * PAIRS}.weight": square[:1], f"{4 * PAIRS}.bias": bias[:1]}
    arrays.pop(without, None)
    with path.open("wb") as file:
        file.writelines(safetensors.encode(arrays, dict.fromkeys(arrays, "float32"), {}))
    return sum(array.nbytes for array in arrays.values())


def words(folder: Path, name: str, weights: Path | None, steps: int, **keys: Any) -> list[str]:
    """Command line of a run's configuration; ``keys`` have __ instead of the dot."""
    base = {
        "name": name,
        "task": f"{__file__}:task",
        "run_dir": folder / name,
        "train.steps": steps,
        "train.global_batch": 4,
        "monitor.enabled": "false",
        "checkpoint.interval": "none",
        **({} if weights is None else {"checkpoint.init_from": weights}),
    }
    given = base | {key.replace("__", "."): value for key, value in keys.items()}
    return [word for key, value in given.items() for word in (f"--{key}", str(value))]


on_meta = functools.partial(words, task_args__meta="true")
