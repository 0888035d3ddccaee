"""A DCGAN in PyTorch that generates handwritten digits: two networks, trained alternately by a custom training step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

from hpctrain import TorchTask

NOISE = 16
"""Size of the noise vector from which an image is generated."""
Models = Mapping[str, nn.Module]
Batch = dict[str, torch.Tensor]


def generator(width: int = 32) -> nn.Module:
    """float32[n, NOISE] -> float32[n, 1, 8, 8] in 0 to 1 (Radford et al. 2015, for small images).

    Uses GroupNorm, because BatchNorm would compute its statistics from each rank's own samples.
    """
    return nn.Sequential(
        nn.Unflatten(1, (NOISE, 1, 1)),
        nn.ConvTranspose2d(NOISE, 2 * width, kernel_size=4),
        nn.GroupNorm(8, 2 * width),
        nn.ReLU(),
        nn.ConvTranspose2d(2 * width, width, kernel_size=4, stride=2, padding=1),
        nn.GroupNorm(8, width),
        nn.ReLU(),
        nn.Conv2d(width, 1, kernel_size=3, padding=1),
        nn.Sigmoid(),
    )


def discriminator(width: int = 32) -> nn.Module:
    """float32[n, 1, 8, 8] -> float32[n]: logit that the image is real."""
    return nn.Sequential(
        nn.Conv2d(1, width, kernel_size=4, stride=2, padding=1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(width, 2 * width, kernel_size=4, stride=2, padding=1),
        nn.GroupNorm(8, 2 * width),
        nn.LeakyReLU(0.2),
        nn.Flatten(),
        nn.Linear(2 * width * 2 * 2, 1),
        nn.Flatten(0),
    )


def should_be(real: float, logits: torch.Tensor) -> torch.Tensor:
    """Mean binary cross-entropy of the logits against one label: 1 for real, 0 for generated."""
    return functional.binary_cross_entropy_with_logits(logits, torch.full_like(logits, real))


def step(ctx: Any, batch: Batch) -> None:
    """Train the discriminator to tell real from generated images, then the generator to fool it."""
    judge = ctx.models["discriminator"]
    made_up = ctx.models["generator"](batch["noise"])
    told_apart = should_be(1, judge(batch["image"])) + should_be(0, judge(made_up.detach()))
    ctx.backward(told_apart, "discriminator")
    ctx.update("discriminator")
    ctx.backward(should_be(1, judge(made_up)), "generator")
    ctx.update("generator")


def add_noise(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Add noise that depends on the sample and the epoch, not on the rank that draws it."""
    return {**sample, "noise": rng.standard_normal(NOISE, np.float32)}


def forward(models: Models, batch: Batch) -> Batch:
    """Outputs for validation and prediction: generated images, and the logits of real and generated ones."""
    image = models["generator"](batch["noise"])
    judge = models["discriminator"]
    return {"image": image, "real": judge(batch["image"]), "made_up": judge(image)}


def recognised(outputs: Batch, batch: Batch) -> torch.Tensor:
    """Fraction of real images classified as real."""
    return (outputs["real"] > 0).float().mean()


def fooled(outputs: Batch, batch: Batch) -> torch.Tensor:
    """Fraction of generated images classified as real."""
    return (outputs["made_up"] > 0).float().mean()


def task(lr: float = 1e-3) -> TorchTask:
    """The task, on scikit-learn's handwritten digits; the last 297 are held out."""
    digits = (load_digits().images[:, None] / 16).astype(np.float32)
    train, image = digits[:-297], digits[-297:]
    noise = np.random.default_rng(0).standard_normal((len(image), NOISE), np.float32)
    models = {"generator": generator(), "discriminator": discriminator()}
    return TorchTask(
        model=models,
        optimizer={
            name: torch.optim.Adam(model.parameters(), lr=lr, betas=(0.5, 0.999)) for name, model in models.items()
        },
        step=step,
        train={"image": train},
        transform=add_noise,
        validation={"image": image, "noise": noise},
        forward=forward,
        metrics={"recognised": recognised, "fooled": fooled},
    )
