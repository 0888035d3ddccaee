"""The data, and the notes of steps, of every program."""

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
"""Seconds that each step takes longer, as if the model were larger."""


def note(log: Path, step: int) -> None:
    """Notes the time of a step, Unix seconds, its attempt and its number, and pauses."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT") or os.environ.get(ATTEMPT, "0")
    with log.open("a") as file:
        file.write(f"{time.time()} {attempt} {step}\n")
    time.sleep(PAUSE_S)


class Notes(BaseHook):
    """Rank 0 notes each step."""

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
