"""Weights & Biases tracking by a process that follows the events: ``python -m hpctrain.track.wandb``."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from hpctrain.run.events import Event, RunFinished
from hpctrain.run.folder import RunDir
from hpctrain.track.follower import Follower, main, shown
from hpctrain.track.sink import scalars

QUIET = {
    "WANDB_SILENT": "true",
    "WANDB_CONSOLE": "off",
    "WANDB_DISABLE_GIT": "true",
    "WANDB_DISABLE_CODE": "true",
    "WANDB_ERROR_REPORTING": "false",
}
"""Environment variables that keep wandb from collecting and sending anything else."""


class WandbFollower(Follower):
    """Writes to <run folder>/wandb, from which wandb uploads unless it is offline.

    ``wandb`` is the imported library.
    """

    def __init__(self, run_dir: RunDir, wandb: Any, project: str) -> None:
        super().__init__("wandb", run_dir, project)
        self.wandb = wandb
        self.run: Any = None
        self.taken = self.offset

    def open_run(self) -> str:
        """Returns the run's id, so that all attempts continue one run."""
        return str(self.view.look(within_s=0.0).id)

    def begin(self) -> None:
        """Does nothing: the configuration is sent with each attempt, see ``take``."""

    def take(self, events: Sequence[Event]) -> None:
        """Sends scalars by step."""
        if self.run is None:
            found = self.view.look(within_s=0.0)
            self.run = self.wandb.init(
                project=self.uri,
                id=self.run_id,
                name=found.name,
                resume="allow",
                dir=str(self.run_dir.path),
                config={**shown(found.config), "data_read": dict(found.data)},
            )
        for event in events:
            if values := scalars(event):
                self.run.log(values, step=event.step)
            if isinstance(event, RunFinished):
                self.run.summary["hpctrain/reason"] = event.reason

    def close(self) -> None:
        """Waits until the server has everything."""
        if self.run is not None:
            self.run.finish()
        self.taken = self.offset
        self.save()

    def confirmed(self) -> int:
        """Offset to resend from. wandb uploads in the background: unless it finished, everything is sent again, and it
        drops duplicates."""
        return self.taken


def make(run_dir: RunDir, project: str, more: str) -> WandbFollower:
    """Makes a follower with wandb, whose import takes seconds."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    import wandb

    return WandbFollower(run_dir, wandb, project)


if __name__ == "__main__":
    sys.exit(main("wandb", make))
