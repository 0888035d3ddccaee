"""What happens beside a part of the start that takes long: it is told of, and a request to stop ends it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import TracebackType

from hpctrain.run.folder import RunDir

POLL_S = 1.0
"""Seconds between two looks for the STOP file."""
TELL_S = 30.0
"""Seconds between two messages that a part still goes on."""


class SetUpWatch:
    """A thread that ends with the ``with`` block.

    Args:
        what: the part, as a verb: "make the task".
        run_dir: where somebody may make the STOP file; None before it is known.
        tell: gets a sentence now and then.
    """

    def __init__(self, what: str, run_dir: RunDir | None, tell: Callable[[str], object]) -> None:
        self.what, self.run_dir, self.tell = what, run_dir, tell
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.watch, name="set-up", daemon=True)

    def __enter__(self) -> None:
        self.thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
