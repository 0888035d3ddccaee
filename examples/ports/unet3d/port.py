"""Segmentation of volumes with a 3-D U-Net (Cicek et al. 2016), trained on random crops; Dice on whole volumes."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from hpctrain import TorchTask

CROP = 8


class Volumes(Dataset):
    """Synthetic: a bright ball in noise, and its mask."""

    def __init__(self, samples, seed, size=16, crop=None):
        rng = np.random.default_rng(seed)
        grid = np.indices((size, size, size))
        self.volumes, self.masks, self.crop = [], [], crop
        for _ in range(samples):
            centre = rng.uniform(5, size - 5, (3, 1, 1, 1))
            mask = ((grid - centre) ** 2).sum(0) < rng.uniform(3, 5) ** 2
            self.masks.append(mask[None].astype(np.float32))
            self.volumes.append((mask + 0.5 * rng.normal(size=mask.shape))[None].astype(np.float32))

    def __len__(self):
        return len(self.volumes)

    def __getitem__(self, i):
        volume, mask = self.volumes[i], self.masks[i]
        if self.crop is not None:
            where = [slice(b, b + self.crop) for b in np.random.randint(0, volume.shape[-1] - self.crop + 1, 3)]
            volume, mask = volume[(slice(None), *where)], mask[(slice(None), *where)]
            if np.random.rand() < 0.5:
                volume, mask = volume[..., ::-1].copy(), mask[..., ::-1].copy()
        return torch.from_numpy(volume), torch.from_numpy(mask)


def double(inner, outer):
    return nn.Sequential(
        nn.Conv3d(inner, outer, 3, padding=1), nn.InstanceNorm3d(outer, affine=True), nn.ReLU(),
        nn.Conv3d(outer, outer, 3, padding=1), nn.InstanceNorm3d(outer, affine=True), nn.ReLU(),
    )  # fmt: skip


class UNet3D(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.first, self.deep = double(1, width), double(width, 2 * width)
        self.up = nn.ConvTranspose3d(2 * width, width, 2, stride=2)
        self.last, self.head = double(2 * width, width), nn.Conv3d(width, 1, 1)

    def forward(self, x):
        fine = self.first(x)
        deep = self.deep(F.max_pool3d(fine, 2))
        return self.head(self.last(torch.cat([fine, self.up(deep)], dim=1)))


def dice(predicted, mask):
    """Dice coefficient per sample, averaged over the batch."""
    predicted, mask = predicted.flatten(1), mask.flatten(1)
    return ((2 * (predicted * mask).sum(1) + 1) / (predicted.sum(1) + mask.sum(1) + 1)).mean()


def dice_bce(logits, mask):
    return F.binary_cross_entropy_with_logits(logits, mask) + 1 - dice(torch.sigmoid(logits), mask)


def task():
    model = UNet3D()
    return TorchTask(
        model=model,
        loss=lambda logits, batch: dice_bce(logits, batch["y"]),
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-2),
        train=Volumes(60, seed=1, crop=CROP),
        validation=Volumes(13, seed=2),
        metrics={"dice": lambda logits, batch: dice((logits > 0).float(), batch["y"])},
    )
