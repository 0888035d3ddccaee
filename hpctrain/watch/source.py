"""What ``hpctrain watch`` shows: the run folder, and Slurm's queue."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

from hpctrain.errors import HpctrainError
from hpctrain.launch.engines import status
from hpctrain.run.folder import RunDir
from hpctrain.run.run_status import QueueEntry
from hpctrain.run.view import RunView
from hpctrain.watch.view import View, make

PORTION_S = 0.5
"""Longest time that a look at a long history takes before what was read so far is shown."""
QUEUE_S = 30.0
"""Seconds between two questions to Slurm."""
ANSWER_S = 0.2
"""Wait for an answer that may be quick, before the view continues without it."""


class Source:
    """One run folder, which need not be there yet."""

    def __init__(self, view: RunView) -> None:
        self.view = view
        self.queue = Queue(RunDir(view.path))

    def look(self, whole: bool = False) -> View:
        """The run as it is now; a long history is read in portions, unless the ``whole`` is wanted.

        Raises:
            UserError: the folder may not be read.
        """
        found = self.view.look(float("inf") if whole else PORTION_S)
        has_ended = found.newest is not None and found.newest.ended is not None
        job = self.queue.ask((len(found.attempts), has_ended), wait=whole)
        shown = make(found, time.time(), job, self.queue.age_s)
        if self.queue.is_asking or found.is_behind:  # what is still to come may show that it continues
            return replace(shown, state=replace(shown.state, is_over=False))
        return shown


class Queue:
    """What Slurm says of a run's newest job, asked now and then by a thread: a controller under load takes its time."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.entry: QueueEntry | None = None
        self.asked = float("-inf")
        self.occasion: object = None
        self.thread: threading.Thread | None = None

    @property
    def age_s(self) -> float:
        """Seconds since Slurm was asked."""
        return time.monotonic() - self.asked

    @property
    def is_asking(self) -> bool:
        """Whether an answer is awaited."""
        return self.thread is not None and self.thread.is_alive()

    def ask(self, occasion: object, wait: bool) -> QueueEntry | None:
        """The last answer; asks again when it is old, or the occasion is another one than last time.

        Args:
            occasion: the state of the run as far as it bears on its job.
            wait: for a new answer.
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
        """Asks. If there is no Slurm, or it does not answer, nothing is known."""
        try:
            self.entry = status.ask([self.run]).job_of(self.run)
        except (HpctrainError, OSError, ValueError, TypeError):
            self.entry = None
