"""Data and step notes shared by the programs."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np

from hpctrain import BaseHook
from hpctrain.run.rank_environment import ATTEMPT
from hpctrain.train.framework import StepResult
from hpctrain.train.hooks import Training

FEATURES, HIDDEN, CLASSES, SAMPLES = 64, 512, 10, 4096
SAVE_EVERY = 10
"""Steps between two checkpoints."""
PAUSE_S = 0.02
"""Seconds added to each step, to simulate a larger model."""


def note(log: Path, step: int) -> None:
    """Appends Unix time, attempt and number of a step to the log, then pauses."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT") or os.environ.get(ATTEMPT, "0")
    with log.open("a") as file:
        file.write(f"{time.time()} {attempt} {step}\n")
    time.sleep(PAUSE_S)


class Notes(BaseHook):
    """Notes each step on rank 0."""

    def __init__(self, log: str) -> None:
        self.log = Path(log)

    def after_step(self, training: Training, result: StepResult) -> None:
        """See ``Hook``."""
        if training.world.rank == 0:
            note(self.log, training.state.step)


def samples() -> dict[str, np.ndarray]:
    """``x`` float32 (SAMPLES, FEATURES), ``y`` int64 (SAMPLES,)."""
    x = np.random.default_rng(0).standard_normal((SAMPLES, FEATURES), dtype=np.float32)
    return {"x": x, "y": x[:, :CLASSES].argmax(axis=1).astype(np.int64)}
