"""A vision transformer that forecasts weather fields: the next state of the atmosphere from the present one.

Model and sizes are those of NERSC's tutorial at SC25: 20 fields on 360 x 720 points, patches of 8 x 8, width 384, 12
blocks. The file holds ``state``, float32[times, fields, rows, columns], once; a sample is a pair of times.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import hpctrain
from hpctrain import TorchTask


class Pairs:
    """Pairs of states ``lead`` times apart, read from one array."""

    def __init__(self, path: str, lead: int) -> None:
        self.states = hpctrain.open_dataset(path, fields=("state",))
        self.lead = lead

    @property
    def fields(self) -> Mapping[str, hpctrain.Field]:
        state = self.states.fields["state"]
        return {"now": state, "later": state}

    def __len__(self) -> int:
        return len(self.states) - self.lead

    def read(self, indices: np.ndarray[Any, np.dtype[np.int64]]) -> dict[str, np.ndarray[Any, Any]]:
        return {"now": self.states.read(indices)["state"], "later": self.states.read(indices + self.lead)["state"]}

    def fingerprint(self) -> str:
        return f"{self.states.fingerprint()} lead {self.lead}"


class Forecaster(nn.Module):
    """Patches of all fields are tokens; each block sees the whole globe."""

    def __init__(self, fields: int, rows: int, columns: int, patch: int, width: int, blocks: int, heads: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(fields, width, patch, patch)
        self.places = nn.Parameter(torch.randn(rows // patch * (columns // patch), width) * 0.02)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(blocks)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, fields * patch * patch)
        self.unpatch = nn.PixelShuffle(patch)

    def forward(self, state: Tensor) -> Tensor:
        """float[n, fields, rows, columns], twice: the change is what is learned."""
        patches = self.patches(state)
        tokens = patches.flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            tokens = block(tokens)
        change = self.head(self.norm(tokens)).transpose(1, 2).unflatten(2, patches.shape[2:])
        forecast: Tensor = state + self.unpatch(change)
        return forecast


def area_weights(rows: int) -> Tensor:
    """float[rows, 1]: areas of the rows from pole to pole, with a mean of 1."""
    latitude = (torch.arange(rows) + 0.5) / rows * math.pi - math.pi / 2
    return (latitude.cos() / latitude.cos().mean())[:, None]


def squared_error(forecast: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Mean squared error over the sphere."""
    weights = area_weights(forecast.shape[-2]).to(forecast.device)
    return ((forecast - batch["later"]) ** 2 * weights).mean()


def persistence(forecast: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Error of "tomorrow as today", which a forecast must beat."""
    return squared_error(batch["now"], batch)


def task(
    train: str = "train.h5",
    validation: str = "validation.h5",
    lead: int = 1,
    patch: int = 8,
    width: int = 384,
    blocks: int = 12,
    heads: int = 8,
    lr: float = 5e-4,
) -> TorchTask:
    """Build the task; times in the file are ``lead`` steps apart."""
    data = functools.partial(Pairs, train, lead)
    model = Forecaster(*data().fields["now"].shape, patch, width, blocks, heads)
    return TorchTask(
        model=model,
        loss=squared_error,
        optimizer=torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1, betas=(0.9, 0.95)),
        train=data,
        validation=functools.partial(Pairs, validation, lead),
        metrics={"persistence": persistence},
    )
