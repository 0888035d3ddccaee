"""Tasks on data of several kinds, whose losses record which samples were trained on, and their values."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpctrain import LengthGroupedSampler, TorchTask, WeightedSampler, World, pad

SAMPLES = 37
LENGTHS = np.random.default_rng(1).integers(1, 9, SAMPLES)


class Sentences(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """A map-style dataset of samples of different lengths, truncated at random."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        noise = random.random() + np.random.random() + float(torch.rand(()))
        tokens = torch.full((int(LENGTHS[index]),), 0.1 * noise)
        return {"tokens": tokens[: 1 + int(torch.randint(8, ()))], "id": index}


class Endless:
    """An endless stream that saves its position."""

    def __init__(self) -> None:
        self.given = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while True:
            self.given += 1
            yield {"tokens": np.full(1 + self.given % 5, 0.01 * self.given, np.float32), "id": self.given - 1}

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self.given = saved["given"]


class Lines(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    """A finite stream that does not save its position."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for index in range(SAMPLES):
            yield {"tokens": torch.full((index % 4 + 1,), 0.01 * index), "id": index}


TABLE = {"tokens": np.linspace(0, 1, 4 * SAMPLES, dtype=np.float32).reshape(SAMPLES, 4), "id": np.arange(SAMPLES)}
TABLE["mask"] = (TABLE["tokens"] > 0.3).astype(np.float32)
URI = "s3://rows/table"
"""Where a test stores the same rows."""


def task(world: World, kind: str, folder: str) -> TorchTask:
    """Regression on the sum of tokens, over padded batches, with data of this kind."""
    kinds: dict[str, dict[str, Any]] = {
        "weighted": {"train": Sentences(), "sampler": WeightedSampler(LENGTHS, 30)},
        "grouped": {"train": functools.partial(Sentences), "sampler": LengthGroupedSampler(LENGTHS)},
        "endless": {"train": Endless()},
        "lines": {"train": Lines()},
        "arrays": {"train": TABLE, "collate": None},
        "table": {"train": URI, "collate": None},
    }
    model = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Dropout(0.0), torch.nn.Linear(4, 1))
    path = Path(folder) / f"{kind}-{world.rank}"

    def loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        sums = (batch["tokens"] * batch["mask"]).sum(1)
        line = " ".join(f"{i}:{x:.6f}" for i, x in zip(batch["id"].tolist(), sums.tolist(), strict=True))

        def note(gradient: torch.Tensor) -> None:
            with open(path, "a") as file:
                file.write(line + "\n")

        output.register_hook(note)  # in the backward pass, which a trial call at the start lacks
        return torch.nn.functional.mse_loss(output[:, 0], sums)

    return TorchTask(
        model=model,
        loss=loss,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        forward=lambda model, batch: model((batch["tokens"] * batch["mask"]).mean(1, keepdim=True)),
        **{"collate": functools.partial(pad, fields=["tokens"], multiple_of=4, mask="mask"), **kinds[kind]},
    )
