"""What each rank of a chaos run writes to a file that survives it: the samples of each step."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain import BaseHook

SAMPLES, FEATURES = 480, 12
LEFT_BYTES = 64 << 20
"""Memory that a rank can still allocate once a fault limits it, and the size of the allocation that then fails."""
PAUSE_S = 0.03
"""Pause per step in seconds, so that a fault can hit any step."""


def data() -> dict[str, np.ndarray]:
    """``x`` float32 (SAMPLES, FEATURES), ``y`` int64 (SAMPLES,) in 0..2, ``id`` int64 (SAMPLES,)."""
    x = np.random.default_rng(3).standard_normal((SAMPLES, FEATURES), dtype=np.float32)
    return {"x": x, "y": x[:, :3].argmax(1).astype(np.int64), "id": np.arange(SAMPLES)}


class Journal(BaseHook):
    """Writes one line at the end of each step: its number, and the ids of this rank's samples in order."""

    def __init__(self, folder: str, pause_s: float = PAUSE_S) -> None:
        self.folder, self.pause_s = Path(folder), pause_s
        self.ids: list[int] = []

    def saw(self, ids: Any) -> None:
        """Record the ids of a micro-batch."""
        self.ids += [int(each) for each in np.asarray(ids)]

    def before_fit(self, training: Any) -> None:
        """See ``Hook``."""
        self.path = self.folder / f"rank-{training.world.rank}.ids"
        self.ids = []  # drop those of trial steps

    def after_step(self, training: Any, result: Any) -> None:
        """See ``Hook``."""
        line = " ".join(map(str, [training.state.step, *self.ids]))
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(file, f"{line}\n".encode())
        os.close(file)
        self.ids = []
        time.sleep(self.pause_s)
        order = self.folder / f"eat-{training.world.rank}"
        if order.exists():
            order.unlink()
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + LEFT_BYTES, resource.RLIM_INFINITY))
            np.ones(LEFT_BYTES)
