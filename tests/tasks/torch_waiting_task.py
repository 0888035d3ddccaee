"""The digits task, whose attempts wait in training until the test lets them continue."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path

import torch

from hpctrain import TorchTask
from hpctrain.tasks import torch_digits

UPDATES = 12
"""Approximate number of updates of an attempt before it waits."""


def task(data: str, gate: str = "") -> TorchTask:
    """The task; files in ``gate``: ``waiting-N`` (attempt N waits), ``go-N`` (it continues), ``slow`` (steps wait)."""
    made = torch_digits.task(data)
    attempt, calls = os.environ.get("HPCTRAIN_ATTEMPT", ""), 0

    def loss(logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        nonlocal calls
        calls += torch.is_grad_enabled()
        if gate and calls == UPDATES:
            Path(gate, f"waiting-{attempt}").touch()
            while not Path(gate, f"go-{attempt}").exists():
                time.sleep(0.02)
        if gate and Path(gate, "slow").exists():
            time.sleep(0.5)
        return torch_digits.loss(logits, batch)

    return dataclasses.replace(made, loss=loss)
