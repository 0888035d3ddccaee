"""Trains a large model from a weights file on two ranks that partition it, created on the meta device or with values.

Rank 0 prints losses and peak memory as JSON. valueless.py FOLDER WEIGHTS WIDTH
"""

from __future__ import annotations

import gc
import json
import re
import sys
from pathlib import Path
from typing import Any

from hpctrain import BaseHook, StepResult, Training, fit, load_config
from hpctrain.comm.world import connect
from tests.tasks.valueless_tasks import words

EVERYONE = connect().everyone


def held(what: str) -> int:
    """Bytes of this process' memory: VmRSS (now) or VmHWM (peak)."""
    found = re.search(rf"^{what}:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10


def begin_again() -> int:
    """Free all memory that can be freed and reset the peak; return the bytes still held."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return held("VmRSS")


class Watcher(BaseHook):
    """Records losses, and peak memory up to the end of the first step."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.before = begin_again()
        self.added: list[int] = []

    def after_step(self, training: Training, result: StepResult) -> None:
        total, weight = result.sums()["loss"]
        self.losses.append(float(total / weight))
        self.added = self.added or EVERYONE.allgather(held("VmHWM") - self.before, "compare what they hold")


def main(folder: Path, weights: Path, width: int) -> dict[str, Any]:
    """Results by plan, and by whether the model is on the meta device."""
    for shard in ("none", "parameters"):  # loads all modules
        fit(load_config(None, words(folder, f"small-{shard}", None, 2, reduce__kind="mpi", parallel__shard=shard)))
    found: dict[str, Any] = {}
    for is_meta in ("true", "false"):
        for axis, size in (("tensor", 2), ("pipeline", 2), ("shard", "parameters")):
            watcher = Watcher()
            keys = {f"parallel__{axis}": size, "task_args__meta": is_meta, "task_args__width": width}
            name = f"{axis}-{is_meta}"
            fit(load_config(None, words(folder, name, weights, 3, **keys)), hooks=[watcher])
            found[name] = {"losses": watcher.losses, "added": watcher.added}
    return found


if __name__ == "__main__":
    everything = main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
    if EVERYONE.rank == 0:
        print(json.dumps(everything))
