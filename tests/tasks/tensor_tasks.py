"""A small float64 GPT for tensor parallelism, and tasks around it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from hpctrain import TorchTask, columns, cross_entropy, rows, vocabulary

WORDS, LENGTH, WIDTH, HEADS, SAMPLES = 24, 7, 16, 4, 20

LAYERS = {
    "blocks.*.qkv": columns(parts=3, heads=HEADS),
    "blocks.*.out": rows,
    "blocks.*.up": columns,
    "blocks.*.down": rows,
    "words": vocabulary,
    "head": columns(gathers=True),
}


class Block(nn.Module):
    """Attention and a feed-forward network."""

    def __init__(self, dropout: float, inner_norm: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.other_norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.inner_norm = nn.LayerNorm(WIDTH // HEADS) if inner_norm else nn.Identity()
        self.inner, self.outer = nn.Dropout(dropout), nn.Dropout(dropout)
        self.drawn: dict[str, Tensor] = {}
        """Masks of the values that the last forward pass dropped."""

    def forward(self, x: Tensor) -> Tensor:
        """[n, length, width]; the number of heads is inferred."""
        qkv = self.qkv(self.norm(x)).unflatten(-1, (3, -1, WIDTH // HEADS))
        q, k, v = self.inner_norm(qkv).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.outer(self.out(attended.transpose(1, 2).flatten(2)))
        hidden = self.inner(functional.gelu(self.up(self.other_norm(x))))
        dropped = self.outer(self.down(hidden))
        if self.training:
            self.drawn = {"inner": hidden == 0, "outer": dropped == 0}
        return x + dropped


class Gpt(nn.Module):
    """A GPT whose embedding and head share their weight."""

    def __init__(self, dropout: float = 0.0, inner_norm: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=1)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block(dropout, inner_norm) for _ in range(2)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        """[n, length, words]."""
        x = self.words(words) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Mean cross-entropy over words."""
    return functional.cross_entropy(outputs.flatten(0, 1), batch["words"].flatten())


def tokens() -> dict[str, NDArray[Any]]:
    """A fixed set of samples."""
    return {"words": np.random.default_rng(2).integers(0, WORDS, (SAMPLES, LENGTH))}


def squares(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Mean square of the outputs, however many there are."""
    return outputs.square().mean()


def gpt(
    dropout: float = 0.0,
    inner_norm: bool = False,
    optimizer: str = "adamw",
    dtype: str = "float64",
    leave_out: str = "",
    gathers: bool = True,
) -> TorchTask:
    """The GPT, with weight decay on matrices only. Without ``gathers``, the loss accepts outputs of any shape."""
    model = Gpt(dropout, inner_norm).to(getattr(torch, dtype))
    matrices = [one for one in model.parameters() if one.ndim > 1]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": [one for one in model.parameters() if one.ndim == 1], "weight_decay": 0.0},
    ]
    made: torch.optim.Optimizer = {
        "adamw": lambda: torch.optim.AdamW(groups, lr=1e-2, eps=1e-4),
        "fused": lambda: torch.optim.AdamW(groups, lr=1e-2, eps=1e-4, fused=True),
        "adagrad": lambda: torch.optim.Adagrad(model.parameters(), lr=1e-2, eps=1e-4),
        "adafactor": lambda: torch.optim.Adafactor(model.parameters(), lr=1e-2),
    }[optimizer]()
    layers = {name: cut for name, cut in LAYERS.items() if name != leave_out}
    if not gathers:
        layers["head"] = columns
    judge = loss if gathers else squares
    return TorchTask(model, judge, made, tokens(), validation=tokens(), tensor=layers)


def numbered() -> TorchTask:
    """The GPT on samples with an ``id``."""
    return replace(gpt(), train=tokens() | {"id": np.arange(SAMPLES)})


def classes() -> TorchTask:
    """A task whose loss works on partial logits, so that no rank needs those of all words."""
    cuts = LAYERS | {"head": columns(classes=True)}
    return replace(numbered(), loss=lambda outputs, batch: cross_entropy(outputs, batch["words"]), tensor=cuts)


def part_of_classes() -> TorchTask:
    """A task whose loss mistakes a rank's partial outputs for all of them."""
    return replace(gpt(gathers=False), loss=loss)


def by_layers() -> TorchTask:
    """A task that calls layers of the model instead of the model."""
    return replace(gpt(), forward=lambda model, batch: model.head(model.norm(model.words(batch["words"]))))


def opening() -> TorchTask:
    """A task that initialises torch.distributed itself, for this rank alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    return gpt()
