"""A float64 recommender whose embedding tables can be split across ranks, and tasks around it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from hpctrain import TorchTask, columns, vocabulary

ROWS, WIDTH, SAMPLES, VISITS = {"users": 23, "films": 10, "kinds": 3, "tags": 9}, 4, 40, 5
"""Sizes that do not split evenly over 4 ranks, one of which gets no ``kinds``."""


class Recommender(nn.Module):
    """Ratings of films from four tables to be split, one of which sums its rows, and a fifth that is replicated."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.tables = nn.ModuleDict(
            {
                name: nn.Embedding(rows, WIDTH, 2 if name == "films" else None, sparse=sparse)
                for name, rows in ROWS.items()
            }
        )
        self.tables["tags"] = nn.EmbeddingBag(ROWS["tags"], WIDTH, mode="sum", sparse=sparse)
        self.days = nn.Embedding(7, WIDTH, sparse=sparse)
        self.deep = nn.Sequential(nn.Linear(6 * WIDTH, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """[n]."""
        seen = self.tables["films"](batch["seen"]).mean(1)
        each = [self.tables[name](batch[name]) for name in ROWS]
        found: Tensor = self.deep(torch.cat([*each, seen, self.days(batch["days"])], 1)).squeeze(1)
        return found


def visits() -> dict[str, NDArray[Any]]:
    """A fixed set of samples, in which some users do not occur."""
    random = np.random.default_rng(4)
    found = {name: random.integers(0, rows, SAMPLES) for name, rows in (ROWS | {"days": 7}).items()}
    found |= {
        name: random.integers(0, ROWS[of], (SAMPLES, VISITS)) for name, of in (("seen", "films"), ("tags", "tags"))
    }
    return found | {"y": random.normal(size=SAMPLES), "id": np.arange(SAMPLES)}


def forward(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Pass the whole batch to the model."""
    return model(batch)  # type: ignore[no-any-return]


def loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Mean squared error over the samples."""
    return functional.mse_loss(outputs.double(), batch["y"])


def weighted(outputs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Weighted squared error, as (sum, weight)."""
    weights = 1 + batch["users"].double()
    return ((outputs - batch["y"]).square() * weights).sum(), weights.sum()


def recommender(
    optimizer: str = "adamw", weighs: bool = False, dtype: str = "float64", device: str = "cpu"
) -> TorchTask:
    """The recommender; gradients of tables are sparse if the optimizer supports that."""
    torch.manual_seed(3)
    with torch.device(device):
        model = Recommender(sparse=optimizer not in ("adamw", "adafactor")).to(getattr(torch, dtype))
    tables = [one.weight for one in (*model.tables.values(), model.days)]  # type: ignore[union-attr]
    rest = list(model.deep.parameters())
    groups = [{"params": tables, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    made: Any = {
        "adamw": lambda: torch.optim.AdamW(groups, lr=1e-2, eps=1e-4),
        "sparse-adam": lambda: [torch.optim.SparseAdam(tables, lr=1e-2, eps=1e-4), torch.optim.Adam(rest, lr=1e-2)],
        "adagrad": lambda: torch.optim.Adagrad(model.parameters(), lr=1e-2, eps=1e-4),
        "sgd": lambda: torch.optim.SGD(model.parameters(), lr=0.1),
        "momentum": lambda: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        "adafactor": lambda: torch.optim.Adafactor(model.parameters(), lr=1e-2),
    }[optimizer]()
    words = {"tables.*": vocabulary, "deep.0": columns}
    judge = weighted if weighs else loss
    return TorchTask(model, judge, made, visits(), validation=visits(), forward=forward, tensor=words)


def unmarked() -> TorchTask:
    """A task that says how layers are cut, but not tables."""
    return replace(recommender(), tensor={"deep.0": columns})


class Penalised(Recommender):
    """A recommender whose outputs include a penalty on its own parameters."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """[n]."""
        return super().forward(batch) + 1e-3 * sum(one.square().sum() for one in self.parameters())


def penalised() -> TorchTask:
    """A task whose model reads all of its parameters in ``forward``."""
    task = recommender()
    task.model.__class__ = Penalised
    return task


def wrong() -> TorchTask:
    """A task that marks a table that does not exist."""
    return replace(recommender(), tensor={"tables.usres": vocabulary})


def outside() -> TorchTask:
    """A task with samples in order, the 13th of which has an index out of range."""
    task = recommender()
    data = visits()
    data["users"][12] = ROWS["users"]
    return replace(task, train=data, sampler=lambda epoch: np.arange(SAMPLES))
