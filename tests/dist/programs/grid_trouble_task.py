"""The task of pipeline_tasks.py, in which a rank is killed or hangs within a pass, once per run."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from pathlib import Path

from hpctrain import BaseHook, TorchTask, World
from hpctrain.train.framework import StepResult
from hpctrain.train.hooks import Training
from tests.tasks.pipeline_tasks import gpt


class Trouble(BaseHook):
    """Kills or hangs this rank in the first block after ``step`` updates, once a checkpoint is complete."""

    def __init__(self, kind: str, step: int, folder: Path) -> None:
        self.kind, self.step, self.is_due = kind, step, False
        self.befallen, self.checkpoints = folder / "befallen", folder / "run" / "checkpoints"

    def after_step(self, training: Training, result: StepResult) -> None:
        self.is_due = training.state.step >= self.step and any(self.checkpoints.glob("step-*"))

    def strike(self) -> None:
        if not self.is_due or self.befallen.exists():
            return
        self.befallen.touch()
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)


def task(world: World, folder: str, kind: str = "", rank: int = -1, step: int = 0) -> TorchTask:
    """``kind``: kill or hang; a file in ``folder`` records that it has happened."""
    made = gpt()
    if world.rank != rank:
        return made
    trouble = Trouble(kind, step, Path(folder))
    for block in made.model.blocks:
        block.register_forward_pre_hook(lambda *_: trouble.strike())
    return dataclasses.replace(made, hooks=[trouble])
