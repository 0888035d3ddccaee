"""Stop requests: ranks agree on one at a step boundary, without slowing the step; start-up is just interrupted."""

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
"""Flag that rank 0 sends in place of a signal number when it finds the STOP file."""
REPLACED = 256
"""Flag that rank 0 sends when it finds that a newer attempt has begun."""
POLL_S = 1.0
"""Seconds between checks for the STOP file, each of which may be a round trip to a metadata server."""


class StopRequests(BaseHook):
    """Ends the loop on all ranks after the same step, once any rank got a signal or rank 0 found the STOP file.

    If rank 0 finds that a newer attempt has replaced this one, all ranks fail after the same step instead and save
    nothing. That works even if their supervisor is gone or suspended.

    After each step the ranks start a non-blocking maximum of their flags (MPI_Iallreduce) and read the result of the
    one before, whose messages travelled during the step, so reading it does not block.
    """

    def __init__(self, signals: StopSignals, run_dir: RunDir, report: Callable[[Event], object]) -> None:
        """``report`` is called with events on rank 0."""
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
        """Returns the flag agreed on at the step before, 0 for no request; starts the exchange of this step's flag."""
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
        """Returns this rank's own flag: REPLACED, a signal number, STOP_FILE, or 0."""
        if self.looks_for_file and self.finds_replacement():
            return REPLACED
        if self.signals.received:
            return self.signals.first
        return STOP_FILE if self.looks_for_file and self.finds_file() else 0

    def finds_file(self) -> bool:
        """Whether the STOP file exists; checks at most every POLL_S seconds, else returns False."""
        now = time.monotonic()
        if now < self.next_look:
            return False
        self.next_look = now + POLL_S
        return os.path.exists(self.stop_path)

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

    def request_behind(self, flag: int) -> StopRequest:
        """Returns who asked: the STOP file's author if there is one, as the supervisor reports; else by the flag."""
        told = BY_PERSON if flag == STOP_FILE else StopRequest.of_signal(flag)
        return requested_stop(self.run_dir) or told

    def after_fit(self, training: Training, reason: StopReason) -> None:
        """Completes a pending exchange; all ranks get here after the same step."""
        if self.request is not None:
            self.request.Wait()
            self.request = None

    def close(self) -> None:
        """Frees the communicator, unless an exchange is pending: after an error other ranks may never complete it."""
        if self.comm is not None and self.request is None:
            with contextlib.suppress(Exception):
                self.comm.Free()
        self.comm = None


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
        return self.run_dir is not None and self.run_dir.stop_file.exists()
