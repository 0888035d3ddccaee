"""Reads what ``hpctrain watch`` shows: a handful of files in the run folder, and Slurm's queue. Never writes.

A look opens five files and reads what has changed in them; no folder is listed.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

from hpctrain.errors import HpctrainError
from hpctrain.launch.engines.slurm import status
from hpctrain.run import live_lock
from hpctrain.run.documents import info_of
from hpctrain.run.event_follower import Following
from hpctrain.run.file_tail import JsonFile
from hpctrain.run.folder import RunDir
from hpctrain.run.history import run_config
from hpctrain.run.job import QueueEntry
from hpctrain.run.standing import Life
from hpctrain.watch.view import Found, View, live_view_of, make

PORTION_S = 0.5
"""Longest time that a look at a long history takes before what was read so far is shown."""
QUEUE_S = 30.0
"""Seconds between two questions to Slurm."""
ANSWER_S = 0.2
"""Wait for an answer that may be quick, before one goes on without it."""


class Source:
    """One run folder, which need not be there yet."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.following = Following(run)
        self.info = JsonFile(run.run_json, info_of)
        self.live = JsonFile(run.monitor / "live.json", live_view_of)
        self.lock = JsonFile(run.lock_file, live_lock.lock_of)
        self.me = live_lock.myself()
        self.config: dict[str, Any] = {}
        self.num_attempts = 0
        self.queue = Queue(run)
        self.beat: tuple[float | None, float] = None, 0.0
        """Newest sign of life by the file system's clock, and when it was seen by our monotonic one."""

    def look(self, whole: bool = False) -> View:
        """The run as it is now; a long history is read in portions, unless the ``whole`` is wanted.

        Raises:
            UserError: the folder may not be read.
        """
        # A run takes the lock, begins an attempt, writes events, ends the attempt, gives the lock back. In this order
        # of looks, no end is seen without the events before it, and no attempt without its holder.
        life = self.life()
        info = self.info.read()
        life = life or self.life()
        until = time.monotonic() + PORTION_S
        digest = self.following.look()
        while self.following.is_behind and (whole or time.monotonic() < until):
            digest = self.following.look()
        attempts = info.get("attempts") or []
        if not self.config or len(attempts) != self.num_attempts:  # an attempt may come with other options
            self.config, self.num_attempts = run_config(self.run.run_yaml) or self.config, len(attempts)
        found = Found(
            self.run.path,
            self.config,
            info,
            digest,
            self.live.read(),
            life,
            self.queue.ask((len(attempts), bool(attempts) and "ended" in attempts[-1]), wait=whole),
            self.queue.age_s,
            self.following.decoder.note,
        )
        view = make(found, time.time(), self.following.is_behind)
        if self.queue.is_asking or self.following.is_behind:  # what comes yet may tell that it goes on
            return replace(view, state=replace(view.state, is_over=False))
        return view

    def life(self) -> Life | None:
        """Who uses the run folder, and whether they still do."""
        saved = self.lock.read()
        if self.lock.changed is None:
            return None
        try:
            holder = live_lock.Holder(**saved)
        except TypeError:  # being written just now
            return None
        now = time.monotonic()
        if self.beat[0] != self.lock.changed:
            # The clocks of this host and of the file system may differ; from the next sign of life on, ours counts.
            first = max(0.0, time.time() - self.lock.changed) if self.beat[0] is None else 0.0
            self.beat = self.lock.changed, now - first
        lives = live_lock.is_live(holder, now - self.beat[1], self.me)
        sure = holder.machine == self.me.machine
        return Life(lives, sure, f"process {holder.pid} on {holder.host}")


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
        """The last answer; asks anew when it is old, or the occasion is another one than last time.

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
        """Asks. Where there is no Slurm, or it does not answer, nothing is known."""
        try:
            jobs = status.jobs_of(self.run)
            self.entry = status.newest(jobs, status.known([jobs]))
        except (HpctrainError, OSError, ValueError, TypeError):
            self.entry = None
