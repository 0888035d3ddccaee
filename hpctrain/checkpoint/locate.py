"""From what a user types to a checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

from hpctrain.checkpoint.format.layout import STEP_FOLDER
from hpctrain.checkpoint.store import CheckpointStore
from hpctrain.errors import UserError


def locate(text: str, step: int | None = None) -> tuple[CheckpointStore, int | None]:
    """The store, and the step where one is meant, of a run folder, a folder of checkpoints, or one checkpoint's folder.

    Raises:
        UserError: there is no such folder, or no checkpoint in it.
    """
    path = Path(text)
    named = STEP_FOLDER.fullmatch(path.name)
    if named:
        store, step = CheckpointStore(path.parent), int(named[1])
    else:
        store = CheckpointStore(path / "checkpoints" if os.path.isdir(path / "checkpoints") else path)
    steps = store.steps()
    if step is not None and step not in steps:
        raise UserError(f"{store.path} has no checkpoint of step {step}", f"choose one of {steps or '(none)'}")
    if not steps:
        raise UserError(f"{path} has no checkpoint", "give a run folder, its checkpoints folder, or one checkpoint")
    return store, step
