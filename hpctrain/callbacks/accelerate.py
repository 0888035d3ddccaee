"""Loops with Accelerate under ``hpctrain run`` and ``submit``."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

from hpctrain.errors import ExitCode
from hpctrain.programs.own_loop import checkpoint_saved, stop_requested


class SaveOnStop:
    """Saves what ``accelerator.save_state`` saves at a stop request, and ends the program with exit code 75.

    Args:
        accelerator: the Accelerator, after its ``prepare``.
        folder: where checkpoints are kept, as ``step-N``; each save removes the one before.
        every_steps: number of updates between further saves, for failures without a warning; None: none.
    """

    def __init__(self, accelerator: Any, folder: str, every_steps: int | None = None) -> None:
        self.accelerator = accelerator
        self.folder = Path(folder)
        self.every_steps = every_steps

    def resume(self) -> int:
        """Loads the newest checkpoint and returns its step; 0 if there is none. Collective.

        What saves left that were killed half-way is removed.
        """
        if self.accelerator.is_main_process:
            for step in self.steps("partial"):
                shutil.rmtree(self.folder / f"partial-{step}", ignore_errors=True)
        self.accelerator.wait_for_everyone()  # before anyone saves
        step = max(self.steps(), default=0)
        if step:
            self.accelerator.load_state(str(self.folder / f"step-{step}"))
            checkpoint_saved(step)
        return step

    def after_step(self, step: int) -> None:
        """Saves if it is time to. Call it on all ranks after each update, with the number of updates so far."""
        stops = stop_requested(agree=True)
        if stops or (self.every_steps is not None and step % self.every_steps == 0):
            self.save(step)
        if stops:
            sys.exit(int(ExitCode.STOPPED))

    def save(self, step: int) -> None:
        """Saves a checkpoint of this step. Collective."""
        partial = self.folder / f"partial-{step}"
        whole = self.folder / f"step-{step}"
        older = self.steps()
        self.accelerator.save_state(str(partial))
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process and step not in older:
            partial.rename(whole)
            for one in older:
                shutil.rmtree(self.folder / f"step-{one}", ignore_errors=True)
        checkpoint_saved(step)

    def steps(self, kind: str = "step") -> list[int]:
        """Returns the steps of complete checkpoints, or of ``partial`` ones."""
        names = [path.name.removeprefix(f"{kind}-") for path in self.folder.glob(f"{kind}-*")]
        return [int(name) for name in names if name.isdecimal()]
