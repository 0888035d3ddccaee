"""A gate at which training waits after a step until the test opens it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from hpctrain.run.rank_environment import current_attempt
from hpctrain.train.hooks import BaseHook, Training
from tests.support.command import wait_for


@dataclass(frozen=True)
class Gate:
    """The test's side: an attempt waits as long as there is a file for it in the folder."""

    folder: Path

    def close(self, *attempts: int) -> Gate:
        """Make attempts wait."""
        self.folder.mkdir(exist_ok=True)
        for attempt in attempts:
            (self.folder / f"hold-{attempt}").touch()
        return self

    def await_ranks(self, ranks: int, attempt: int = 1) -> None:
        """Return when this number of ranks are waiting."""
        wait_for("ranks that wait", lambda: len(list(self.folder.glob(f"held-{attempt}-*"))) == ranks)

    def open(self, attempt: int = 1) -> None:
        """Let the attempt continue."""
        (self.folder / f"hold-{attempt}").unlink()


class Hold(BaseHook):
    """The training side: waits after a number of updates of an attempt, if the test has closed the gate.

    Args:
        gate: the folder of the gate.
        at: number of updates before the wait.
        pause_s: extra seconds per update of such an attempt, so that background work keeps up.
    """

    def __init__(self, gate: str, at: int, pause_s: float = 0.0) -> None:
        self.gate, self.left, self.pause_s = Path(gate), at, pause_s

    def after_hooks(self, training: Training) -> None:
        attempt = current_attempt()
        closed = self.gate / f"hold-{attempt}"
        self.left -= 1
        if self.left >= 0 and closed.exists():
            time.sleep(self.pause_s)
        if self.left == 0 and closed.exists():
            (self.gate / f"held-{attempt}-{training.world.rank}").touch()
            while closed.exists():
                time.sleep(0.02)
