"""A small PyTorch network with dropout, for any parallel plan."""

from __future__ import annotations

import torch
from torch import nn

from hpctrain import TorchTask, columns, rows
from tests.chaos.notes import FEATURES, PAUSE_S, Journal, data


def task(folder: str, pause_s: float = PAUSE_S) -> TorchTask:
    """Return the task; ranks write their journals to ``folder``."""
    journal = Journal(folder, pause_s)
    model = nn.Sequential(
        nn.Linear(FEATURES, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3)
    )

    def loss(logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        journal.saw(batch["id"])
        return nn.functional.cross_entropy(logits, batch["y"])

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    cut = {"0": columns, "3": rows}  # for tensor plans: dropout acts on each rank's own shard
    return TorchTask(model, loss, optimizer, train=data(), hooks=[journal], tensor=cut)
