"""Watches a long part of the start-up: reports that it is still running, and ends it on a request to stop."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

from hpctrain.run.folder import RunDir

POLL_S = 1.0
"""Seconds between checks for the STOP file."""
TELL_S = 30.0
"""Seconds between messages that a part is still running."""


class SetUpWatch:
    """A thread that ends with the ``with`` block.

    Args:
        what: the part, as a verb: "make the task".
        run_dir: where a STOP file may appear; None before the folder is known.
        tell: shows a message to the user.
    """

    def __init__(self, what: str, run_dir: RunDir | None, tell: Callable[[str], object]) -> None:
        self.what, self.run_dir, self.tell = what, run_dir, tell
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.watch, name="set-up", daemon=True)

    def __enter__(self) -> None:
        self.thread.start()

    def __exit__(self, *error: object) -> None:
        self.over.set()
        self.thread.join()

    def watch(self) -> None:
        """Passes the STOP file on as a signal: the main thread alone can be interrupted."""
        begin = time.monotonic()
        told = begin
        while not self.over.wait(POLL_S):
            now = time.monotonic()
            if now - told >= TELL_S:
                told = now
                self.tell(f"{self.what}: {now - begin:.0f} s so far")
            if self.run_dir is not None and self.run_dir.stop_file.exists() and not self.over.is_set():
                os.kill(os.getpid(), signal.SIGTERM)
                return
