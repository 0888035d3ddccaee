"""The Hugging Face ``Trainer`` under ``hpctrain run`` and ``submit``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, trainer_utils

from hpctrain.errors import ExitCode
from hpctrain.programs.own_loop import checkpoint_saved, saved_step, stop_requested


class SaveOnStop(TrainerCallback):
    """Saves a checkpoint when the run is asked to stop, and ends the program with exit code 75.

    Pass it as ``Trainer(callbacks=[SaveOnStop()])``, and resume with ``newest_checkpoint``. Checkpoints that the
    Trainer saves anyway (``save_steps``) are reported too.
    """

    def __init__(self) -> None:
        self.stops = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Reports the step of the checkpoint that was loaded."""
        if state.global_step:
            checkpoint_saved(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Asks for a checkpoint and for the end of training, on all ranks after the same step."""
        if stop_requested(agree=True) and not control.should_training_stop:
            self.stops = control.should_save = control.should_training_stop = True
        return control

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Reports a checkpoint."""
        checkpoint_saved(state.global_step)
        if self.stops:  # the end of training would load the best checkpoint, and with a limit of 1 delete this one
            args.load_best_model_at_end, args.save_total_limit = False, None

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ends the program, so that what follows ``train()`` in it waits for the end of training."""
        if self.stops:
            sys.exit(int(ExitCode.STOPPED))


def newest_checkpoint(output_dir: str) -> str | None:
    """Returns the checkpoint folder to resume from, for ``Trainer.train(resume_from_checkpoint=...)``; None at first.

    It is the newest one that was saved completely, if ``SaveOnStop`` has reported it; otherwise the newest folder.
    """
    folder = Path(output_dir)
    whole = folder / f"checkpoint-{saved_step()}"
    if whole.is_dir():
        return str(whole)
    last: Callable[[str], str | None] = trainer_utils.get_last_checkpoint  # which has no types
    return last(output_dir) if folder.is_dir() else None
