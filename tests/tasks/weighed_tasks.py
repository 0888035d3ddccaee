"""A GPT and a perceptron whose memory is planned and measured."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from examples.gpt import Block, Gpt
from hpctrain import TorchTask, columns, cross_entropy, rows, vocabulary

SAMPLES = 32


def gpt(width: int = 128, blocks: int = 6, words: int = 256, length: int = 48) -> TorchTask:
    """The GPT of ``examples``, on random tokens."""
    torch.manual_seed(0)
    layers = [Block(width, 4, 4, 4 * width, gated=False, norm=nn.LayerNorm) for _ in range(blocks)]
    model = Gpt(words, width, layers, nn.LayerNorm, tied=False)
    tokens = np.random.default_rng(1).integers(0, words, (SAMPLES, length + 1))
    return TorchTask(
        model,
        lambda logits, batch: cross_entropy(logits, batch["tokens"][:, 1:]),
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        {"tokens": tokens},
        forward=lambda model, batch: model(batch["tokens"][:, :-1].clone()),
        tensor={
            "words": vocabulary,
            "blocks.*.qkv": columns(heads=4),
            "blocks.*.out": rows,
            "blocks.*.up": columns,
            "blocks.*.down": rows,
            "head": columns(classes=True),
        },
        layers=Gpt.layers,
    )


class Residual(nn.Module):
    """Two linear layers whose outputs are added to their inputs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """float[n, width]."""
        return values + self.down(torch.tanh(self.up(self.norm(values))))  # type: ignore[no-any-return]


def mlp(width: int = 256, depth: int = 6) -> TorchTask:
    """A perceptron."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, width), *(Residual(width) for _ in range(depth)), nn.Linear(width, 8))
    random = np.random.default_rng(1)
    x, y = (random.normal(size=(SAMPLES, size)).astype(np.float32) for size in (64, 8))
    cuts = {
        f"{layer}.{name}": kind for layer in range(1, depth + 1) for name, kind in (("up", columns), ("down", rows))
    }
    return TorchTask(model, "mse", torch.optim.AdamW(model.parameters(), lr=1e-3), {"x": x, "y": y}, tensor=cuts)
