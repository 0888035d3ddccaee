"""Requests to stop: the ranks agree at a step boundary, at no cost to the step; long parts of the start-up just end."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from hpctrain.errors import Replaced
from hpctrain.run.attempts import Attempts
from hpctrain.run.events import Event, StopRequested
from hpctrain.run.folder import RunDir
from hpctrain.run.live_lock import BEAT_S
from hpctrain.run.rank_environment import current_attempt
from hpctrain.run.stop_request import BY_PERSON, StopRequest, requested_stop
from hpctrain.system.signals import StopSignals
from hpctrain.train.framework import StepResult
from hpctrain.train.hooks import BaseHook, StopReason, Training

STOP_FILE = 128
"""What rank 0 sends the others in place of a signal number when it found the STOP file."""
REPLACED = 256
"""The same if rank 0 found that a newer attempt has begun."""
POLL_S = 1.0
"""Seconds between checks for the STOP file: each may be a round trip to a metadata server."""


class StopRequests(BaseHook):
    """Ends the loop on all ranks after the same step once any rank got a signal, or rank 0 found the STOP file.

    If rank 0 finds that a newer attempt has replaced this one, all ranks fail after the same step instead, and save
    nothing: that holds too if their supervisor is gone or asleep.

    After each step the ranks start a non-blocking maximum over their flags, and read the one started a step before:
    its messages travelled during the step, so reading it does not wait.
    """

    def __init__(self, signals: StopSignals, run_dir: RunDir, report: Callable[[Event], object]) -> None:
        """``report`` is called with events, on rank 0."""
        self.signals = signals
        self.run_dir = run_dir
        self.report = report
        self.comm: Any = None
        self.request: Any = None
        self.mine = np.zeros(1, dtype=np.int32)
        self.agreed = np.zeros(1, dtype=np.int32)
        self.attempt = current_attempt()
        self.looks_for_file = False
        self.stop_path = os.fspath(run_dir.stop_file)
        self.next_look = 0.0
        self.next_look_at_fence = 0.0

    def before_fit(self, training: Training) -> None:
        self.looks_for_file = training.world.rank == 0
        if training.world.everyone.comm is not None:
            from mpi4py import MPI

            self.comm = training.world.everyone.comm.Dup()
            self.operation = MPI.MAX

    def after_step(self, training: Training, result: StepResult) -> StopReason | None:
        flag = self.agree()
        if not flag:
            return None
        if flag == REPLACED:
            raise Replaced(f"attempt {self.attempt} of {self.run_dir.path} has been replaced by a newer one")
        if training.world.rank == 0:
            asked = self.request_behind(flag)
            self.report(StopRequested(step=training.state.step, by=asked.by, code=asked.code))
        return StopReason.REQUESTED

    def agree(self) -> int:
        """What the ranks agreed on at the step before, 0 for no request; passes this step's flag on."""
        if self.comm is None:
            return self.flag()
        flag = 0
        if self.request is not None:
            self.request.Wait()
            flag = int(self.agreed[0])
            self.request = None
        if not flag:
            self.mine[0] = self.flag()
            self.request = self.comm.Iallreduce(self.mine, self.agreed, self.operation)
        return flag

    def flag(self) -> int:
        """This rank's own request."""
        if self.looks_for_file and self.finds_replacement():
            return REPLACED
        if self.signals.received:
            return self.signals.first
        return STOP_FILE if self.looks_for_file and self.finds_file() else 0

    def finds_file(self) -> bool:
        """Looks for the STOP file, at most every POLL_S seconds."""
        now = time.monotonic()
        if now < self.next_look:
            return False
        self.next_look = now + POLL_S
        return os.path.exists(self.stop_path)

    def finds_replacement(self) -> bool:
        """Checks whether a newer attempt has begun, as often as the holder of the run folder renews its lock."""
        now = time.monotonic()
        if now < self.next_look_at_fence:
            return False
        self.next_look_at_fence = now + BEAT_S
        try:
            Attempts(self.run_dir).check_fence(self.attempt)
        except Replaced:
            return True
        except OSError:  # a file server that does not answer now
            pass
        return False

    def request_behind(self, flag: int) -> StopRequest:
        """Who asked: what the STOP file says, where there is one, is what the supervisor heard first."""
        told = BY_PERSON if flag == STOP_FILE else StopRequest.of_signal(flag)
        return requested_stop(self.run_dir) or told

    def after_fit(self, training: Training, reason: StopReason) -> None:
        """Completes what is still under way: all ranks come here after the same step."""
        if self.request is not None:
            self.request.Wait()
            self.request = None

    def close(self) -> None:
        """After an error the others may never answer: what is under way is left to MPI's end."""
        if self.comm is not None and self.request is None:
            with contextlib.suppress(Exception):
                self.comm.Free()
        self.comm = None


LOOK_S = 1.0
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

    def __enter__(self) -> SetUpWatch:
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.over.set()
        self.thread.join()

    def watch(self) -> None:
        """Passes the STOP file on as a signal: the main thread alone can be interrupted."""
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
        return self.run_dir is not None and self.run_dir.stop_file.exists()
