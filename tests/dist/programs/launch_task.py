"""A tiny task that misbehaves in a given way, on one rank, at one step."""

from __future__ import annotations

import atexit
import ctypes
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import h5py
import numpy as np
import torch

from hpctrain import BaseHook, TorchTask, World
from hpctrain.train.hooks import Hook, Training

SAMPLES = 32


def task(
    world: World, mode: str = "", at: int = 4, rank: int = 1, data: str = "", library: str = "", gate: str = ""
) -> TorchTask:
    """A linear model on random numbers. STEP_S in the environment is the time of a step; ``gate``: see ``Hold``."""
    if mode == "raise-in-task" and world.rank == rank:
        raise RuntimeError("this rank has no luck")
    if mode == "second-mpi":
        load_copy_of(library)
    model = torch.nn.Linear(3, 1)
    misbehave = Misbehaviour(mode if world.rank == rank else "", at, float(os.environ.get("STEP_S", "0")))

    def loss(outputs, batch):
        return misbehave((outputs[:, 0] - batch["y"]).square().mean())

    return TorchTask(
        model=model,
        loss=loss,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        train=data or samples(),
        hooks=[misbehave, *(held(gate, at) if gate else [])],
    )


def held(gate: str, at: int) -> list[Hook]:
    from tests.support.gate import Hold  # only where tests can be imported

    return [Hold(gate, at)]


def samples() -> dict[str, np.ndarray]:
    random = np.random.default_rng(1)
    x = random.normal(size=(SAMPLES, 3)).astype(np.float32)
    return {"x": x, "y": x.sum(1)}


class Misbehaviour(BaseHook):
    """Counts calls of the loss in training, one per update, and misbehaves at one of them."""

    def __init__(self, mode: str, at: int, step_s: float) -> None:
        self.mode = mode
        self.at = at
        self.step_s = step_s
        self.calls = 0
        self.trains = False

    def before_fit(self, training: Training) -> None:
        self.calls, self.trains = 0, True

    def __call__(self, loss: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls > 1 and not self.trains:
            return loss
        time.sleep(self.step_s)
        if self.mode == "slow" and self.calls >= self.at:
            time.sleep(5 * self.step_s)  # more than other processes on the machine can cost
        if self.calls != self.at:
            return loss
        if self.mode == "raise":
            raise ValueError("bad sample")
        if self.mode == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.mode == "exit":
            os._exit(0)
        if self.mode == "sys-exit":
            sys.exit(0)
        if self.mode == "sleep":
            time.sleep(600)
        if self.mode == "linger":
            atexit.register(time.sleep, 600)
        if self.mode == "fill":
            fill(Path(os.environ["HPCTRAIN_RUN_DIR"]))
        if self.mode == "nan-gradient":
            return loss + (loss * 0).sqrt()
        return loss * float("nan") if self.mode == "nan" else loss


def fill(folder: Path) -> None:
    """Fill a small file system."""
    assert shutil.disk_usage(folder).total < 2**26, "this is no small file system"
    with open(folder / "filler", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return


def load_copy_of(library: str) -> None:
    """Load another MPI library into this process, as Horovod might have done."""
    ctypes.CDLL(library)


def ragged(path: Path) -> None:
    """Write datasets of different lengths."""
    with h5py.File(path, "w") as file:
        file["x"], file["y"] = np.zeros((8, 3), np.float32), np.zeros(7, np.float32)


def without_targets(path: Path) -> None:
    """Write a file without an array that the loss needs."""
    with h5py.File(path, "w") as file:
        file["x"] = np.zeros((8, 3), np.float32)
