"""Training that waits behind a step, until a test has done to it what it wants to do."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from hpctrain.run.rank_environment import current_attempt
from hpctrain.train.hooks import BaseHook, Training
from tests.support.command import wait_for


@dataclass(frozen=True)
class Gate:
    """What tests see of it: attempts in whose name there is a file wait."""

    folder: Path

    def close(self, *attempts: int) -> Gate:
        """Has attempts wait."""
        self.folder.mkdir(exist_ok=True)
        for attempt in attempts:
            (self.folder / f"hold-{attempt}").touch()
        return self

    def await_ranks(self, ranks: int, attempt: int = 1) -> None:
        """Returns when all of them wait."""
        wait_for("ranks that wait", lambda: len(list(self.folder.glob(f"held-{attempt}-*"))) == ranks)

    def open(self, attempt: int = 1) -> None:
        """Lets them go on."""
        (self.folder / f"hold-{attempt}").unlink()


class Hold(BaseHook):
    """Waits behind a number of an attempt's updates, if a test has closed its gate.

    Args:
        gate: the folder.
        at: the number of updates.
        pause_s: how long each update of such an attempt takes besides, so that work in the background keeps up.
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
