"""Four ranks, two per model: one is slow for a while, then hangs; some layers have more work; a rank fails.

tensor_monitor.py FOLDER. Work is a timed wait; the sums of tensor-parallel layers and the gradient exchange are real.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from hpctrain import HpctrainError, TorchTask, UserError, World, columns, fit, load_config, rows

BLOCKS, WORK_S = 2, 0.012
SLOW = (3, 0.030, range(48, 88))
"""Rank, extra seconds in each block, steps in which it is slow."""
HANGS_AT, HANG_S = 96, 2.0


class Block(nn.Module):
    """Work between the sums of two tensor-parallel layers."""

    def __init__(self, extra_s: Any) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        self.extra_s = extra_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        time.sleep(WORK_S + self.extra_s())
        return x + self.down(hidden)


def task(world: World, folder: str, trouble: str) -> TorchTask:
    """A model of blocks that count their passes."""
    calls = itertools.count()
    events = Path(folder) / "monitor" / "events.jsonl"

    def extra_s() -> float:
        step = next(calls) // BLOCKS
        if trouble == "error" and world.rank == 3 and step:
            raise UserError("this rank cannot go on", "none")
        if trouble in ("plan", "stage"):
            return 0.030 * world.tensor.rank + 0.040 * world.pipeline.rank
        rank, seconds, when = SLOW
        if world.rank == rank and step == HANGS_AT:
            deadline = time.monotonic() + 15 * HANG_S
            while time.monotonic() < deadline and '"hang"' not in events.read_text():
                time.sleep(0.1)
        return seconds if world.rank == rank and step in when else 0.0

    model = nn.Sequential(*(Block(extra_s) for _ in range(2 * BLOCKS if trouble == "stage" else BLOCKS)))
    layers = {"*.up": columns, "*.down": rows}
    data = {"inputs": np.ones((64, 8), np.float32)}
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return TorchTask(model, lambda outputs, batch: outputs.square().mean(), optimizer, data, tensor=layers)


def run(folder: Path, trouble: str, steps: int, axis: str = "tensor") -> None:
    """One run with two ranks per model, in a folder named after the trouble."""
    keys = {
        "name": trouble,
        "task": f"{__file__}:task",
        "task_args.folder": folder / trouble,
        "task_args.trouble": trouble,
        "run_dir": folder / trouble,
        f"parallel.{axis}": 2,
        "train.steps": steps,
        "train.global_batch": 4,
        "reduce.kind": "mpi",
        "monitor.window_steps": 8,
        "monitor.hang_s": HANG_S,
        "monitor.on_hang": "report",
        "checkpoint.enabled": "false",
        "track.every_steps": 40,
    }
    fit(load_config(None, [word for key, value in keys.items() for word in (f"--{key}", str(value))]))


if __name__ == "__main__":
    run(Path(sys.argv[1]), "rank", 104)
    run(Path(sys.argv[1]), "plan", 40)
    run(Path(sys.argv[1]), "stage", 24, "pipeline")
    with contextlib.suppress(HpctrainError):
        run(Path(sys.argv[1]), "error", 8)
