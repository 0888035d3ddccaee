"""Stop requests: ranks agree on one at a step boundary, without slowing the step; start-up is just interrupted."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

from hpctrain.comm.step_vote import StepVote
from hpctrain.errors import Replaced
from hpctrain.run.attempts import Attempts
from hpctrain.run.events import Event, StopRequested
from hpctrain.run.folder import RunDir
from hpctrain.run.live_lock import BEAT_S
from hpctrain.run.rank_environment import current_attempt
from hpctrain.run.stop_request import BY_PERSON, StopRequest, is_asked_to_stop, requested_stop
from hpctrain.system.signals import StopSignals
from hpctrain.train.framework import StepResult
from hpctrain.train.hooks import BaseHook, StopReason, Training

STOP_FILE = 128
"""Rank 0's vote in place of a signal number when it finds the STOP file."""
POLL_S = 1.0
"""Seconds between checks for the STOP file, each of which may be a round trip to a metadata server."""


class StopRequests(BaseHook):
    """Ends the loop on all ranks after the same step, once any rank got a signal or rank 0 found the STOP file.

    If rank 0 finds that a newer attempt has replaced this one, all ranks fail after the same step instead and save
    nothing. That works even if their supervisor is gone or suspended.

    After each step the ranks vote, and read the result of the vote before; see ``StepVote``.
    """

    def __init__(self, signals: StopSignals, run_dir: RunDir, report: Callable[[Event], object]) -> None:
        """``report`` is called with events on rank 0."""
        self.signals = signals
        self.run_dir = run_dir
        self.report = report
        self.attempt = current_attempt()
        self.looks_for_file = False
        self.next_look = 0.0
        self.next_look_at_fence = 0.0

    def before_fit(self, training: Training) -> None:
        self.looks_for_file = training.world.rank == 0

    def after_step(self, training: Training, result: StepResult) -> StopReason | None:
        is_alone = training.world.everyone.comm is None
        agreed = self.vote() if is_alone else training.ballot.agreed()
        if agreed.replaced:
            raise Replaced(f"attempt {self.attempt} of {self.run_dir.path} has been replaced by a newer one")
        if agreed.stop:
            if training.world.rank == 0:
                told = BY_PERSON if agreed.stop == STOP_FILE else StopRequest.of_signal(agreed.stop)
                asked = requested_stop(self.run_dir) or told  # the STOP file's author, as the supervisor reports
                self.report(StopRequested(step=training.state.step, by=asked.by, code=asked.code))
            return StopReason.REQUESTED
        if not is_alone:
            mine = self.vote()
            training.ballot.cast(stop=mine.stop, replaced=mine.replaced)
        return None

    def vote(self) -> StepVote:
        """This rank's vote: whether it is replaced, or else whether it is asked to stop."""
        if self.looks_for_file and self.finds_replacement():
            return StepVote(replaced=True)
        if self.signals.received:
            return StepVote(stop=self.signals.first)
        return StepVote(stop=STOP_FILE if self.looks_for_file and self.finds_file() else 0)

    def finds_file(self) -> bool:
        """Whether the STOP file exists; checks at most every POLL_S seconds, else returns False."""
        now = time.monotonic()
        if now < self.next_look:
            return False
        self.next_look = now + POLL_S
        return is_asked_to_stop(self.run_dir)

    def finds_replacement(self) -> bool:
        """Whether a newer attempt has begun; checks every BEAT_S seconds, as often as the lock is renewed."""
        now = time.monotonic()
        if now < self.next_look_at_fence:
            return False
        self.next_look_at_fence = now + BEAT_S
        try:
            Attempts(self.run_dir).check_fence(self.attempt)
        except Replaced:
            return True
        except OSError:  # the file server does not answer at the moment
            pass
        return False


LOOK_S = 1.0
"""Seconds between checks for the STOP file."""
TELL_S = 30.0
"""Seconds between messages that a part of the start-up is still running."""


class SetUpWatch:
    """Watches a part of the start-up, in a thread that ends with the ``with`` block.

    Interrupts the part if a STOP file appears, and reports every TELL_S seconds that it is still running.

    Args:
        what: the part, as a verb phrase: "make the task".
        run_dir: where a STOP file may appear; None before the folder is known.
        tell: shows a message to the user.
    """

    def __init__(self, what: str, run_dir: RunDir | None, tell: Callable[[str], object]) -> None:
        self.what, self.run_dir, self.tell = what, run_dir, tell
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.watch, name="set-up", daemon=True)

    def __enter__(self) -> SetUpWatch:
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.over.set()
        self.thread.join()

    def watch(self) -> None:
        """Body of the thread. Turns a STOP file into a signal, which interrupts the main thread."""
        begin = time.monotonic()
        told = begin
        while not self.over.wait(LOOK_S):
            now = time.monotonic()
            if now - told >= TELL_S:
                told = now
                self.tell(f"{self.what}: {now - begin:.0f} s so far")
            if self.asked() and not self.over.is_set():
                os.kill(os.getpid(), signal.SIGTERM)
                return

    def asked(self) -> bool:
        """Whether the run was asked to stop. Parts shorter than LOOK_S ask at their end."""
        return self.run_dir is not None and is_asked_to_stop(self.run_dir)
