"""What ranks read of a state of 136 MB, under several plans: checkpoint_reading.py FOLDER; rank 0 prints JSON."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from hpctrain import BaseHook, CheckpointStore, StepResult, TorchTask, Training, columns, fit, load_config, rows
from hpctrain.checkpoint.export import export_safetensors
from hpctrain.checkpoint.format.layout import ITEM_TYPES
from hpctrain.checkpoint.initial import Weights, with_weights
from hpctrain.comm.world import connect

EVERYONE = connect().everyone
WIDTH = 2060  # no multiple of a block; half a row is longer than a page, so it is read separately


def task() -> TorchTask:
    """Four matrices of 17 MB, each with momentum: 136 MB."""
    layers = [module for _ in range(4) for module in (nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh())]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    data = {key: np.zeros((4, WIDTH), np.float32) for key in ("x", "y")}
    return TorchTask(model, "mse", optimizer, data, tensor={"0": columns, "2": rows, "4": columns, "6": rows})


class Counter(BaseHook):
    """Counts bytes read from files before the first step, and bytes of the state that a rank holds."""

    def __init__(self) -> None:
        self.read, self.manifests = 0, 0
        self.real_read, self.real_open = os.preadv, os.open
        self.found: list[Any] = []

    def __enter__(self) -> Counter:
        os.preadv, os.open = self.preadv, self.opened  # type: ignore[assignment]
        return self

    def __exit__(self, *error: object) -> None:
        os.preadv, os.open = self.real_read, self.real_open

    def preadv(self, *arguments: Any) -> int:
        """Stand-in for ``os.preadv``."""
        count = self.real_read(*arguments)
        self.read += count
        return count

    def opened(self, path: Any, *arguments: Any, **more: Any) -> int:
        """Stand-in for ``os.open``."""
        self.manifests += Path(os.fsdecode(path)).name == "manifest.json"
        return self.real_open(path, *arguments, **more)

    def after_step(self, training: Training, result: StepResult) -> None:
        if self.found:
            return
        held: dict[str, int] = {"model": 0, "optimizer": 0}
        for one in training.framework.state():
            kind = one.name.partition("/")[0]
            held[kind] = held.get(kind, 0) + int(np.prod(one.shape)) * ITEM_TYPES[one.dtype].itemsize
        mine = [self.read, held["model"], held["optimizer"], self.manifests]
        self.found = EVERYONE.allgather(mine, "compare what was read")  # before this one's own checkpoint is saved


def run(folder: Path, name: str, steps: int, **keys: Any) -> list[Any]:
    """For each rank: bytes read, bytes of its weights and of its optimizer state, manifests opened."""
    base = {
        "name": name,
        "task": f"{__file__}:task",
        "run_dir": folder / name,
        "train.steps": steps,
        "train.global_batch": 4,
        "train.accumulate": 2,
        "reduce.kind": "mpi",
        "monitor.enabled": "false",
        "checkpoint.interval": "none",
        "checkpoint.keep_last": 1,
        "track.every_steps": 100,
    }
    given = base | {key.replace("__", "."): value for key, value in keys.items()}
    words = [word for key, value in given.items() for word in (f"--{key}", str(value))]
    with Counter() as counter:
        fit(load_config(None, words), hooks=[counter])
    return counter.found


def damaged_on_one(folder: Path) -> list[str]:
    """Which checkpoint each rank loads when it reads half of the weights, and the second rank's half is corrupt."""
    store = CheckpointStore(folder, group=EVERYONE)
    for step in (1, 2):
        store.save({"model/w": np.full((4 << 20, 1), step, np.uint8)}, step=step)
    store.close()
    if EVERYONE.rank == 0:
        path = sorted(store.folder(2).glob("*.h5"))[1]
        with open(path, "r+b") as file:
            file.seek(path.stat().st_size // 2)
            file.write(b"x")
    EVERYONE.barrier("damage it")

    def use(weights: Weights, path: str) -> str:
        return str(weights.arrays.part("w", (EVERYONE.rank << 21, 0), (1 << 21, 1)).max())

    return EVERYONE.allgather(with_weights(str(folder), use, EVERYONE), "compare what was taken")


if __name__ == "__main__":
    main_folder = Path(sys.argv[1])
    tensor: dict[str, Any] = {"parallel__tensor": 2}
    pipeline: dict[str, Any] = {"parallel__pipeline": 2}
    parameters: dict[str, Any] = {"parallel__shard": "parameters"}
    results: dict[str, Any] = {"damaged": damaged_on_one(main_folder / "damaged")}
    results["whole"] = run(main_folder, "whole", 1)
    if EVERYONE.rank == 0:
        with CheckpointStore(main_folder / "whole" / "checkpoints").opened(1) as loaded:
            export_safetensors(loaded, main_folder / "whole.safetensors")
    EVERYONE.barrier("export")
    for name, plan, source in (
        ("pipeline", pipeline, "whole"),
        ("parameters", parameters, "whole.safetensors"),
        ("tensor", tensor, "whole.safetensors"),
        ("tensor", tensor, "whole"),
    ):
        run_name = f"{name}-from-{source}"
        results[run_name] = run(main_folder, run_name, 1, **plan, checkpoint__init_from=main_folder / source)
    chain = [("tensor-again", tensor), ("pipeline", pipeline), ("parameters", parameters), ("tensor", tensor)]
    for number, (name, plan) in enumerate(chain, 2):
        results[f"{name}-resumed"] = run(main_folder, "tensor-from-whole", number, **plan)
    if EVERYONE.rank == 0:
        print(json.dumps(results))
