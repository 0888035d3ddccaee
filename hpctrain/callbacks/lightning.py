"""Lightning's ``Trainer`` under ``hpctrain run`` and ``submit``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Callback

from hpctrain.errors import ExitCode
from hpctrain.programs.own_loop import checkpoint_saved, listen, stop_requested


class SaveOnStop(Callback):
    """Saves a checkpoint when the run is asked to stop, and ends the program with exit code 75.

    Pass it as ``Trainer(callbacks=[save])``, and resume with ``trainer.fit(..., ckpt_path=save.newest())``. It replaces
    Lightning's own handlers of stop signals, which exchange messages between steps or requeue the job themselves.

    Args:
        folder: where the checkpoint is kept; each save replaces the one before.
        every_steps: number of updates between further saves, for failures without a warning; None: none.
    """

    def __init__(self, folder: str, every_steps: int | None = None) -> None:
        self.path = Path(folder) / "newest.ckpt"
        self.every_steps = every_steps
        self.saved: int | None = None

    def newest(self) -> str | None:
        """Returns the checkpoint to resume from; None if there is none."""
        return str(self.path) if self.path.exists() else None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Takes the signals over from Lightning, and reports the step of the checkpoint that was loaded."""
        listen()
        self.saved = trainer.global_step
        if self.saved:
            checkpoint_saved(self.saved)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Saves if it is time to; the same on all ranks."""
        stops, step = stop_requested(agree=True), trainer.global_step
        due = self.every_steps is not None and step % self.every_steps == 0 and step != self.saved
        if stops or due:
            # Lightning writes it under another name first, and returns on all ranks once it is complete.
            trainer.save_checkpoint(self.path)
            self.saved = step
            checkpoint_saved(step)
        if stops:
            sys.exit(int(ExitCode.STOPPED))
