"""A small GPT on the characters of a text file, with PyTorch. A template for your own language models."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from hpctrain.errors import UserError, file_errors
from hpctrain.tasks.definition import TorchTask, columns, rows

VALIDATION_SHARE = 0.1


class Block(nn.Module):
    """Causal self-attention and a feed-forward network, each after a LayerNorm and with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """float32[n, t, width] -> the same shape."""
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, -1, self.head_width))  # -1: this rank's heads
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """int64[n, t] tokens -> float32[n, t, vocabulary] logits (Radford et al. 2019, without dropout)."""

    def __init__(self, vocabulary: int, width: int, blocks: int, heads: int, context: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of the next token at each position."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.token(tokens) + self.position(places))))


def loss(logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Mean cross-entropy of the next character, in nats."""
    return functional.cross_entropy(logits.flatten(0, 1), batch["target"].flatten())


def task(
    text: str | None = None, context: int = 64, width: int = 128, blocks: int = 2, heads: int = 4, lr: float = 1e-3
) -> TorchTask:
    """The task; ``text`` is a UTF-8 file, by default the manual that comes with Python."""
    characters, codes = np.unique(list(read(text)), return_inverse=True)
    samples = (len(codes) - 1) // context
    if samples < 20:
        raise UserError(f"{text} holds {len(codes)} characters", f"give a text of at least {20 * context + 1}")
    length = samples * context
    data = {
        "token": codes[:length].reshape(samples, context).astype(np.int64),
        "target": codes[1 : length + 1].reshape(samples, context).astype(np.int64),
    }
    held_out = max(1, round(samples * VALIDATION_SHARE))
    model = GPT(len(characters), width, blocks, heads, context)
    return TorchTask(
        model=model,
        loss=loss,
        optimizer=torch.optim.AdamW(model.parameters(), lr=lr, fused=True),
        train={name: array[:-held_out] for name, array in data.items()},
        validation={name: array[-held_out:] for name, array in data.items()},
        tokens="token",
        tensor={
            "blocks.*.qkv": columns(parts=3, heads=heads),
            "blocks.*.out": rows,
            "blocks.*.up": columns,
            "blocks.*.down": rows,
        },
    )


def read(text: str | None) -> str:
    """Read the text file, by default Python's manual, or this file if Python has none."""
    if text is None:
        manual = importlib.util.find_spec("pydoc_data.topics")
        text = manual.origin if manual and manual.origin else __file__
    with file_errors(f"text file {text} cannot be read", "set task_args.text"):
        return Path(text).read_text(encoding="utf-8")
