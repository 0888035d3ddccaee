"""Trains a small GPT whose layers two ranks split, by each way to exchange; rank 0 prints JSON.

tensor_exchanges.py FOLDER
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hpctrain.comm.world import connect
from tests.support import plan_runs
from tests.tasks import tensor_tasks

CUT = {"parallel__tensor": 2}
BY_GROUP = CUT | {"reduce__kind": "nccl"}
IN_ROWS = {"parallel__sequence": "true"}
COMPILED = {"train__compile": "true", "train__recompute": "['blocks.*']"}
TWO: dict[str, dict[str, Any]] = {
    "group": BY_GROUP,
    "rows": BY_GROUP | IN_ROWS,
    "compiled": CUT | IN_ROWS | COMPILED,
}


def run(folder: Path, name: str, **keys: Any) -> dict[str, Any]:
    """A run of three updates with uneven micro-batches."""
    base: dict[str, Any] = {
        "task": f"{tensor_tasks.__file__}:gpt",
        "train__steps": 3,
        "train__global_batch": 5,
        "train__accumulate": 2,
        "train__clip_norm": 0.5,
        "train__ema_decay": 0.9,
    }
    return plan_runs.train(folder, name, plan_runs.Watcher(), **base | keys)


if __name__ == "__main__":
    torch.compile = partial(torch.compile, backend="aot_eager")  # type: ignore[assignment]  # the same graphs; no C++ compiler
    everyone, target = connect().everyone, Path(sys.argv[1])
    plans: dict[str, dict[str, Any]] = TWO if everyone.size == 2 else {"alone": {}}
    found = {name: run(target, name, **keys) for name, keys in plans.items()}
    if everyone.rank == 0:
        print(json.dumps(found))
