"""Text classification with PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from hpctrain import TorchTask

WORDS = 100


def texts(samples: int, seed: int) -> dict[str, np.ndarray[Any, Any]]:
    """Synthetic texts as word ids, one of which decides the class; replace them with your own.

    May return arrays with a leading sample axis (all texts of one length), the path of an HDF5 file made by
    ``hpctrain data pack``, or a Dataset.
    """
    random = np.random.default_rng(seed)
    words = random.integers(2, WORDS, (samples, 24))
    label = random.integers(0, 2, samples)
    words[np.arange(samples), random.integers(0, 24, samples)] = label  # word 0 or word 1, somewhere
    return {"words": words, "label": label}


def accuracy(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Fraction of correct predictions."""
    return (output.argmax(1) == batch["label"]).float().mean()


def task(width: int = 16, lr: float = 3e-3) -> TorchTask:
    """Build the task; ``task_args`` in the run file sets the arguments."""
    words = nn.EmbeddingBag(WORDS, width, mode="max")
    nn.init.normal_(words.weight, std=0.05)
    model = nn.Sequential(words, nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 2))
    return TorchTask(
        model=model,
        loss="cross_entropy",  # or a function(output, batch) of your own
        optimizer=torch.optim.AdamW(model.parameters(), lr=lr),
        train=texts(2000, seed=1),
        validation=texts(400, seed=2),
        metrics={"accuracy": accuracy},
    )
