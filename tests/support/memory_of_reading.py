"""Measure reading a large checkpoint: memory_of_reading.py <torch or tensorflow> <folder>; prints a line of JSON.

For each reader: bytes read from files relative to the size of the state, and peak memory beyond the state that it
fills, in MiB.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpctrain.checkpoint.export import Selection, export_safetensors
from hpctrain.checkpoint.initial import load_initial
from hpctrain.checkpoint.initial_match import WeightSource
from hpctrain.checkpoint.store import CheckpointStore, load_weights
from hpctrain.checkpoint.verify import verify_checkpoint
from hpctrain.comm.world import alone
from hpctrain.train.framework import Framework
from hpctrain.train.stateful import value_of

WIDTH = 3001  # no block ends at the end of a row, and malloc returns such large tensors to the system at once


def torch_framework() -> Framework:
    """A PyTorch model of 36 MB with Adam, 108 MB together."""
    import torch

    from tests.tasks.torch_tasks import make_framework

    return make_framework(
        alone(),
        lambda: torch.nn.Linear(WIDTH, WIDTH),
        optimizer=lambda model: torch.optim.Adam(model.parameters()),
    )


def step(framework: Framework) -> None:
    """Make a PyTorch optimizer create its state."""
    import torch

    for parameter in framework.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    framework.optimizer.step()
    framework.optimizer.zero_grad()


def tensorflow_framework() -> Framework:
    """The same model in Keras."""
    import keras

    from tests.tasks.tensorflow_tasks import make_framework

    return make_framework(alone(), lambda: keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(WIDTH)]))


def status(key: str) -> int:
    """A memory figure of this process from /proc/self/status, in bytes."""
    return int(re.findall(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) << 10


def measured(work: Callable[[], Any]) -> tuple[int, int]:
    """Bytes that a call reads, and its peak memory in bytes beyond that before and after it."""
    total, real_preadv, real_read = [0], os.preadv, os.read

    def preadv(descriptor: int, views: Any, offset: int, flags: int = 0) -> int:
        count = real_preadv(descriptor, views, offset, flags)
        total[0] += count
        return count

    def read(descriptor: int, count: int) -> bytes:
        data = real_read(descriptor, count)
        total[0] += len(data)
        return data

    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = status("VmRSS")
    os.preadv, os.read = preadv, read
    try:
        work()
    finally:
        os.preadv, os.read = real_preadv, real_read
    return total[0], status("VmHWM") - max(before, status("VmRSS"))


if __name__ == "__main__":
    kind, folder = sys.argv[1], Path(sys.argv[2])
    make = {"torch": torch_framework, "tensorflow": tensorflow_framework}[kind]
    framework = make()
    if kind == "torch":
        step(framework)
    store = CheckpointStore(folder / "checkpoints")
    state = {tensor.name: value_of(tensor) for tensor in framework.state()}
    sizes = {"all": sum(array.nbytes for array in state.values())}
    sizes["model"] = sum(array.nbytes for name, array in state.items() if name.startswith("model/"))
    store.save(state, step=1)
    store.close()
    del state
    exported = folder / "weights.safetensors"

    def export() -> None:
        with store.opened(1) as loaded:
            export_safetensors(loaded, exported, Selection())

    def take(readers: dict[str, tuple[Callable[[], Any], str]]) -> dict[str, tuple[float, float]]:
        for reader, _ in readers.values():
            reader()  # so that imports and caches are not counted
        amounts = {name: (measured(reader), sizes[held]) for name, (reader, held) in readers.items()}
        return {name: (count / held, more / 2**20) for name, ((count, more), held) in amounts.items()}

    framework.close()
    new = [make(), make()]  # before their first step, as on resume
    each = iter(new)
    found = take(
        {
            "load": (lambda: load_weights(next(each), store), "all"),
            "verify": (lambda: verify_checkpoint(store, 1), "all"),
            "export": (export, "model"),
        }
    )
    framework = make()
    found |= take(
        {
            "init_from a checkpoint": (lambda: load_initial(WeightSource(str(store.path)), framework), "model"),
            "init_from a file": (lambda: load_initial(WeightSource(str(exported)), framework), "model"),
        }
    )
    for one in (*new, framework):
        one.close()
    print(json.dumps(found))
