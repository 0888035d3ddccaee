"""A small GAN with PyTorch that generates points on a ring: two networks, each with its own optimizer."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from hpctrain import TorchTask

NOISE = 4


def points(samples: int, seed: int) -> dict[str, np.ndarray[Any, Any]]:
    """Points at distance 1 from the origin, and noise to generate others from; replace them with your own."""
    random = np.random.default_rng(seed)
    angle = random.uniform(0, 2 * np.pi, samples)
    point = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    noise = random.normal(size=(samples, NOISE))
    return {"point": point.astype(np.float32), "noise": noise.astype(np.float32)}


def step(ctx: Any, batch: dict[str, torch.Tensor]) -> None:
    """Run one training step; it may call ``backward`` and ``update`` any number of times."""
    made_up = ctx.models["maker"](batch["noise"])
    real, false = ctx.models["judge"](batch["point"]), ctx.models["judge"](made_up.detach())
    ctx.backward(functional.softplus(-real).mean() + functional.softplus(false).mean(), "judge")
    ctx.update("judge")
    ctx.backward(functional.softplus(-ctx.models["judge"](made_up)).mean(), "maker")
    ctx.update("maker")


def error(made_up: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Mean distance of generated points from the ring."""
    return (made_up.norm(dim=1) - 1).abs().mean()


def layers(inputs: int, outputs: int) -> nn.Module:
    """A small network."""
    return nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, outputs))


def task(lr: float = 3e-3) -> TorchTask:
    """Build the task; ``task_args`` in the run file sets the arguments."""
    models = {"maker": layers(NOISE, 2), "judge": layers(2, 1)}
    return TorchTask(
        model=models,
        optimizer={
            name: torch.optim.Adam(model.parameters(), lr=lr, betas=(0.5, 0.999)) for name, model in models.items()
        },
        step=step,
        train=points(10_000, seed=1),
        validation=points(400, seed=2),
        forward=lambda models, batch: models["maker"](batch["noise"]),
        metrics={"error": error},
    )
