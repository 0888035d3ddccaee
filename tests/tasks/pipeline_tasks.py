"""float64 models whose layers can be split into pipeline stages, and tasks around them."""

from __future__ import annotations

import dataclasses
import functools
import os
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from hpctrain import TorchTask, columns, rows, vocabulary

WORDS, LENGTH, WIDTH, SAMPLES = 24, 7, 16, 22


def embed(table: nn.Embedding, places: nn.Parameter, words: Tensor) -> dict[str, Any]:
    """What blocks pass on: vectors, the words themselves, a count of blocks so far, and a padding mask."""
    return {"x": table(words) + places, "words": words, "counts": (0, [words.ne(1)])}


class Block(nn.Module):
    """Two layers with a residual connection, masked where there is padding."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.drawn = ""
        """Bits that tell which values the last forward pass dropped."""

    def forward(self, carried: dict[str, Any]) -> dict[str, Any]:
        """Update ``x`` and the count."""
        count, (mask,) = carried["counts"]
        hidden = functional.relu(self.up(self.norm(carried["x"])), inplace=True)
        kept = self.dropout(torch.ones_like(hidden))
        if self.training:
            self.drawn = "".join(map(str, (kept == 0).flatten()[:200].int().tolist()))
        x = carried["x"] + self.down(hidden * kept) * mask.unsqueeze(-1)
        return {**carried, "x": x, "counts": (count + 1, [mask])}


class Head(nn.Module):
    """Logits of words."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.words = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, carried: dict[str, Any]) -> Tensor:
        """[n, length, words]."""
        return self.words(self.norm(carried["x"])) / carried["counts"][0]


class Gpt(nn.Module):
    """Blocks without attention between an embedding table and a head."""

    def __init__(self, dropout: float = 0.0, blocks: int = 4) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(WORDS, WIDTH), nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.blocks = nn.ModuleList([Block(dropout) for _ in range(blocks)])
        self.head = Head()

    def embed(self, words: Tensor) -> dict[str, Any]:
        """What the first block gets."""
        return embed(self.table, self.places, words)

    def forward(self, words: Tensor) -> Tensor:
        """[n, length, words]."""
        carried = self.embed(words)
        for block in self.blocks:
            carried = block(carried)
        return self.head(carried)


def layers(model: Gpt) -> list[Any]:
    """Layers of the pipeline, the first of which is a function."""
    return [functools.partial(embed, model.table, model.places), *model.blocks, model.head]


def loss(outputs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Sum of losses over words that are not padding, and their number."""
    own = batch["words"].ne(1).to(outputs.dtype)
    scores = functional.cross_entropy(outputs.flatten(0, 1), batch["words"].flatten(), reduction="none")
    return (scores * own.flatten()).sum(), own.sum()


def tokens() -> dict[str, NDArray[Any]]:
    """A fixed set of samples."""
    return {"words": np.random.default_rng(2).integers(0, WORDS, (SAMPLES, LENGTH))}


def forward(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Run the model, with an operation before it and an in-place change of its outputs."""
    return model(batch["words"].clone()).mul_(1.5)


def gpt(dropout: float = 0.0, dtype: str = "float64", optimizer: str = "adamw", blocks: int = 4) -> TorchTask:
    """The GPT, with weight decay on matrices only."""
    model = Gpt(dropout, blocks).to(getattr(torch, dtype))
    groups = [
        {"params": [one for one in model.parameters() if one.ndim > 1], "weight_decay": 0.1},
        {"params": [one for one in model.parameters() if one.ndim == 1], "weight_decay": 0.0},
    ]
    cuts = {
        "table": vocabulary,
        "blocks.*.up": columns,
        "blocks.*.down": rows,
        "head.words": columns(gathers=True),
    }
    return TorchTask(
        model,
        loss,
        {"adamw": torch.optim.AdamW, "adagrad": torch.optim.Adagrad}[optimizer](groups, lr=1e-2, eps=1e-4),
        tokens(),
        validation=tokens(),
        forward=forward,
        tensor=cuts,
        layers=layers,
    )


def tied() -> TorchTask:
    """The GPT, whose first and last layers share a table."""
    task = gpt()
    model: Any = task.model
    model.head.words.weight = model.table.weight
    torch.nn.init.normal_(model.table.weight, std=0.1)
    groups = [
        {"params": [one for one in model.parameters() if one.ndim > 1], "weight_decay": 0.1},
        {"params": [one for one in model.parameters() if one.ndim == 1], "weight_decay": 0.0},
    ]
    return dataclasses.replace(task, optimizer=torch.optim.AdamW(groups, lr=1e-2, eps=1e-4), tensor={})


def numbered(dropout: float = 0.0) -> TorchTask:
    """The GPT on samples with an ``id``."""
    return dataclasses.replace(gpt(dropout), train=tokens() | {"id": np.arange(SAMPLES)})


def staged(dropout: float = 0.0) -> TorchTask:
    """``gpt`` with given stages: those by measured times may differ between runs, and so would their random numbers."""
    return dataclasses.replace(gpt(dropout), layers=lambda model: [layers(model)[:3], layers(model)[3:]])


def methods(dtype: str = "float64", blocks: int = 4) -> TorchTask:
    """``gpt`` whose first layer is a method, which reads parameters of the model when it is called."""
    return dataclasses.replace(
        gpt(dtype=dtype, blocks=blocks), layers=lambda model: [model.embed, *model.blocks, model.head]
    )


class Counting(Block):
    """A block that counts the samples that it has seen in training."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__(0.0)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, carried: dict[str, Any]) -> dict[str, Any]:
        """See Block."""
        self.seen += len(carried["x"]) * self.training
        return super().forward(carried)


class Weighted(nn.Module):
    """``loss`` with a weight for each word, which the backward pass needs."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.CrossEntropyLoss(torch.linspace(0.5, 1.5, WORDS, dtype=torch.float64), reduction="none")

    def forward(self, outputs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """See ``loss``."""
        own = batch["words"].ne(1).to(outputs.dtype)
        return (self.score(outputs.flatten(0, 1), batch["words"].flatten()) * own.flatten()).sum(), own.sum()


def counting() -> TorchTask:
    """``methods`` with blocks that count, a state_dict that must be read to be known, and a loss that holds tensors."""
    task = methods()
    model: Any = task.model
    model.blocks = nn.ModuleList([Counting() for _ in range(4)]).double()
    model.register_state_dict_post_hook(lambda *_: None)
    return dataclasses.replace(task, loss=Weighted(), optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2))


def without_values() -> TorchTask:
    """``methods`` on the meta device."""
    with torch.device("meta"):
        return methods()


def sequential(norm: bool = False) -> TorchTask:
    """Plain layers, some without parameters; with ``norm``, also BatchNorm, whose statistics are per micro-batch."""
    between = [nn.BatchNorm1d(12)] if norm else []
    model = nn.Sequential(
        nn.Linear(8, 12), *between, nn.ReLU(inplace=True), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 1)
    )
    model.double()
    random = np.random.default_rng(3)
    data = {"x": random.normal(size=(SAMPLES, 8)), "y": random.normal(size=(SAMPLES, 1))}
    return TorchTask(model, "mse", torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4), data, validation=data)


def astray() -> TorchTask:
    """A task that gives each process different samples."""
    transform = lambda sample, rng: {**sample, "x": sample["x"] + os.getpid()}  # noqa: E731
    return dataclasses.replace(sequential(), transform=transform)
