"""A 3-D U-Net (Cicek et al. 2016) that segments fields on a grid: trained on random crops, judged on whole volumes.

The file holds ``field``, float32[samples, channels, depth, height, width], and ``mask``, uint8[samples, depth, height,
width].
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import hpctrain
from hpctrain import TorchTask

Sample = dict[str, np.ndarray[Any, Any]]


def random_crop(sample: Sample, rng: np.random.Generator, edge: int) -> Sample:
    """A cube of the volume, mirrored along random axes."""
    corner = [rng.integers(length - edge + 1) for length in sample["mask"].shape]
    cube = tuple(slice(start, start + edge) for start in corner)
    mirror = tuple(slice(None, None, -1 if rng.random() < 0.5 else 1) for _ in cube)
    return {
        "field": np.ascontiguousarray(sample["field"][(slice(None), *cube)][(slice(None), *mirror)]),
        "mask": np.ascontiguousarray(sample["mask"][cube][mirror]),
    }


def double_convolution(inputs: int, outputs: int) -> nn.Sequential:
    """Two convolutions; InstanceNorm, because batches of volumes are small."""
    return nn.Sequential(
        nn.Conv3d(inputs, outputs, 3, padding=1), nn.InstanceNorm3d(outputs, affine=True), nn.ReLU(),
        nn.Conv3d(outputs, outputs, 3, padding=1), nn.InstanceNorm3d(outputs, affine=True), nn.ReLU(),
    )  # fmt: skip


class UNet(nn.Module):
    """``levels`` resolutions, each with twice the channels of the one above."""

    def __init__(self, channels: int, width: int, levels: int) -> None:
        super().__init__()
        widths = [width << level for level in range(levels)]
        self.down = nn.ModuleList(map(double_convolution, [channels, *widths], widths))
        self.up = nn.ModuleList(nn.ConvTranspose3d(2 * w, w, 2, stride=2) for w in widths[:-1])
        self.join = nn.ModuleList(double_convolution(2 * w, w) for w in widths[:-1])
        self.head = nn.Conv3d(width, 1, 1)

    def forward(self, field: Tensor) -> Tensor:
        """float[n, channels, d, h, w] -> logits float[n, d, h, w]; edges are multiples of 2 ** (levels - 1)."""
        finer = []
        x = self.down[0](field)
        for down in self.down[1:]:
            finer.append(x)
            x = down(functional.max_pool3d(x, 2))
        for up, join, fine in zip(reversed(self.up), reversed(self.join), reversed(finer), strict=True):
            x = join(torch.cat([fine, up(x)], dim=1))
        logits: Tensor = self.head(x)[:, 0]
        return logits


def dice(probability: Tensor, mask: Tensor) -> Tensor:
    """float[n]: overlap of each sample. Per sample, so that means over ranks and micro-batches are exact."""
    probability, mask = probability.flatten(1), mask.flatten(1).float()
    return (2 * (probability * mask).sum(1) + 1) / (probability.sum(1) + mask.sum(1) + 1)


def loss(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Cross-entropy and Dice."""
    mask = batch["mask"].float()
    entropy = functional.binary_cross_entropy_with_logits(logits, mask)
    return entropy + 1 - dice(logits.sigmoid(), mask).mean()


def overlap(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Mean Dice coefficient of the predicted mask."""
    return dice((logits > 0).float(), batch["mask"]).mean()


def task(
    train: str = "train.h5",
    validation: str = "validation.h5",
    crop: int = 128,
    width: int = 32,
    levels: int = 5,
    lr: float = 1e-3,
) -> TorchTask:
    """Build the task."""
    fields = ("field", "mask")
    data = hpctrain.open_dataset(train, fields)
    model = UNet(data.fields["field"].shape[0], width, levels)
    return TorchTask(
        model=model,
        loss=loss,
        optimizer=torch.optim.AdamW(model.parameters(), lr=lr),
        train=data,
        transform=functools.partial(random_crop, edge=crop),
        validation=hpctrain.open_dataset(validation, fields),
        metrics={"dice": overlap},
    )
