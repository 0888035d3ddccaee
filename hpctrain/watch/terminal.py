"""The live view: reads the run folder and Slurm's queue, and redraws until the run has ended or the user quits."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator
from dataclasses import replace

from rich.console import Console, Group
from rich.live import Live

from hpctrain.errors import HpctrainError
from hpctrain.launch.engines import status
from hpctrain.run.folder import RunDir
from hpctrain.run.run_status import QueueEntry
from hpctrain.run.run_view import RunView
from hpctrain.system.signals import Interrupted, interruptible
from hpctrain.watch.screen import draw
from hpctrain.watch.view import View, make

POLL_S = 2.0
"""Seconds between reads of the run."""
LEAVE = b"qQ\x03\x04"
"""Keys that end the view: q, Ctrl-C, Ctrl-D."""


def show(look: Callable[[], View], console: Console) -> None:
    """Draws the result of ``look`` every POLL_S. After the end of the run, the last view stays on the terminal."""
    view = None
    screen = Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop")
    with contextlib.suppress(Interrupted), interruptible(), _keys() as wait_for_key, screen:
        while True:
            view = look()
            lines = draw(view, console.width, console.height - 1)
            screen.update(Group(*lines, "[dim]q ends this view, not the run[/dim]"), refresh=True)
            if view.state.is_over or wait_for_key(0.0 if view.is_behind else POLL_S):
                break
    if view is not None and view.state.is_over:
        print_once(view, console)


def print_once(view: View, console: Console) -> None:
    """Prints one view as lines."""
    for line in draw(view, console.width, 60):
        console.print(line, soft_wrap=True)


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Yields a function that waits up to a number of seconds for a key that ends the view; returns whether it came."""
    if not sys.stdin.isatty():
        yield lambda seconds: bool(select.select([], [], [], seconds)[0])
        return
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)

    def wait(seconds: float) -> bool:
        ready, _, _ = select.select([keyboard], [], [], seconds)
        pressed = os.read(keyboard, 64) if ready else b""
        return bool(ready) and (not pressed or any(key in LEAVE for key in pressed))

    try:
        tty.setcbreak(keyboard)
        yield wait
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


PORTION_S = 0.5
"""Longest time to read a long history before the part read so far is shown."""
QUEUE_S = 30.0
"""Seconds between queries to Slurm."""
ANSWER_S = 0.2
"""Seconds to wait for a quick answer before continuing without it."""


class WatchedRun:
    """One run folder, which need not exist yet."""

    def __init__(self, view: RunView) -> None:
        self.view = view
        self.queue = Queue(RunDir(view.path))

    def look(self, whole: bool = False) -> View:
        """Reads the run; a long history is read in portions unless ``whole``.

        Raises:
            UserError: the folder cannot be read.
        """
        found = self.view.look(float("inf") if whole else PORTION_S)
        has_ended = found.newest is not None and found.newest.ended is not None
        job = self.queue.ask((len(found.attempts), has_ended), wait=whole)
        shown = make(found, time.time(), job, self.queue.age_s)
        if self.queue.is_asking or found.is_behind:  # the rest may show that it continues
            return replace(shown, state=replace(shown.state, is_over=False))
        return shown


class Queue:
    """The state of a run's newest job in Slurm, queried in a thread since a loaded controller answers slowly."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.entry: QueueEntry | None = None
        self.asked = float("-inf")
        self.occasion: object = None
        self.thread: threading.Thread | None = None

    @property
    def age_s(self) -> float:
        """Seconds since the last query."""
        return time.monotonic() - self.asked

    @property
    def is_asking(self) -> bool:
        """Whether a query is in progress."""
        return self.thread is not None and self.thread.is_alive()

    def ask(self, occasion: object, wait: bool) -> QueueEntry | None:
        """Returns the last answer; queries again if it is old or the occasion has changed.

        Args:
            occasion: the run's state as far as it concerns its job.
            wait: whether to wait for a query in progress.
        """
        is_due = self.age_s > QUEUE_S or occasion != self.occasion
        if is_due and not self.is_asking:
            self.asked, self.occasion = time.monotonic(), occasion
            self.thread = threading.Thread(target=self.refresh, daemon=True)
            self.thread.start()
            self.thread.join(ANSWER_S)
        if wait and self.thread is not None:
            self.thread.join()
        return self.entry

    def refresh(self) -> None:
        """Queries Slurm; the entry is None if there is no Slurm or it does not answer."""
        try:
            self.entry = status.ask([self.run]).job_of(self.run)
        except (HpctrainError, OSError, ValueError, TypeError):
            self.entry = None
