"""``stop_requested`` and ``checkpoint_saved``: how a program with its own training loop talks to its supervisor."""

from __future__ import annotations

import atexit
import functools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from hpctrain.errors import UserError
from hpctrain.programs.folder_group import Place
from hpctrain.run.event_log import EventWriter
from hpctrain.run.events import CheckpointSaved, RunStarted, Train
from hpctrain.run.folder import RunDir
from hpctrain.run.rank_environment import PLACE, STOP_SIGNAL, WATCHED_DIR
from hpctrain.run.stop_request import is_asked_to_stop
from hpctrain.system.files import write_atomically
from hpctrain.system.output import say

LOOK_S = 2.0
"""Seconds between checks for the STOP file."""
REPORT_S = 10.0
"""Seconds between reports of the step on rank 0."""

Agree = Callable[[bool], bool]


def stop_requested(agree: bool = False) -> bool:
    """Whether the program should save a checkpoint and exit with 75 now. Call it once per step.

    True once the supervisor has asked the run to stop: before a time limit, on preemption, on ``hpctrain stop``. The
    first call installs handlers for the stop signals, in place of the program's own. A call takes about a microsecond.
    Without a supervisor (``hpctrain run``, or a Slurm job of ``hpctrain submit``) it returns False and does nothing.

    Args:
        agree: return the same value on all ranks, one call after the first of them was asked. All ranks must then make
            the call after the same steps. It exchanges one number through torch.distributed (gloo, no GPU involved) or
            mpi4py, whichever connects the ranks, and does not wait for it within the step. Without it, ranks may see
            the request at different steps, which is safe only if no rank needs the others from then on.

    Raises:
        UserError: ``agree`` with several ranks, but neither torch.distributed nor mpi4py is initialized.
    """
    link = supervised()
    return link is not None and link.stop_requested(agree)


def checkpoint_saved(step: int) -> None:
    """Reports that a checkpoint of this step is complete on disk, so that a restart repeats only later steps.

    Call it on rank 0, or on all ranks, after each save, and after loading a checkpoint with its step. ``status``,
    ``watch`` and ``explain`` then show the step and how many steps a failure would lose, and a job whose attempts
    save nothing new is not requeued again. Without a supervisor it does nothing.

    Args:
        step: number of updates that the checkpoint contains.

    Raises:
        RunFailed: the run folder cannot be written.
    """
    if (link := supervised()) is not None and link.place.rank == 0:
        link.checkpoint_saved(step)


def saved_step() -> int | None:
    """Returns the step of the run's newest complete checkpoint, as given to ``checkpoint_saved``; None if unknown."""
    link = supervised()
    return link.run_dir.newest_checkpoint_step() if link is not None else None


def listen() -> None:
    """Installs the handlers of stop signals, again if a library has replaced them."""
    if (link := supervised()) is not None:
        link.listen()


@functools.cache
def supervised() -> Supervised | None:
    """Returns the link to the supervisor; None without one."""
    folder, place = os.environ.get(WATCHED_DIR), os.environ.get(PLACE)
    if not folder or not place:
        return None
    return Supervised(RunDir(Path(folder)), Place(**json.loads(place)))


class Supervised:
    """State of one rank: whether it was asked to stop, and on rank 0 the step as far as known."""

    def __init__(self, run_dir: RunDir, place: Place) -> None:
        self.run_dir, self.place, self.pid = run_dir, place, os.getpid()
        self.asked = self.listens = False
        """Whether a stop request was seen, and whether the handlers are installed."""
        self.next_look = self.next_report = 0.0
        self.agree: Agree | None = None
        self.saved = self.base = run_dir.newest_checkpoint_step() or 0
        """Step of the newest checkpoint, and the step from which ``counts`` count."""
        self.counts = {"stop_requested": 0, "heartbeat": 0}
        """Calls since ``base``, each once per step; programs may make only one of the two."""
        self.reported = self.base
        self.events = EventWriter(run_dir.events, say) if place.rank == 0 else None
        if self.events is not None:
            atexit.register(self.report)

    def stop_requested(self, agree: bool) -> bool:
        """See the function of this name."""
        if not self.listens:
            self.listen()
        self.count("stop_requested")
        if not self.asked and time.monotonic() >= self.next_look:
            self.next_look = time.monotonic() + LOOK_S
            self.asked = is_asked_to_stop(self.run_dir)
        if agree and self.place.size > 1:
            self.agree = self.agree or agreement()
            return self.agree(self.asked)
        return self.asked

    def listen(self) -> None:
        """Installs the handlers; only the main thread can, so calls from others leave it to a later one."""
        self.listens = threading.current_thread() is threading.main_thread()
        if self.listens:
            for name in {os.environ.get(STOP_SIGNAL, "SIGTERM"), "SIGTERM", "SIGUSR1"}:
                signal.signal(signal.Signals[name], self.note)

    def note(self, number: int, frame: FrameType | None) -> None:
        """Handles a stop signal."""
        if os.getpid() == self.pid:
            self.asked = True
        else:  # a worker process that was forked from the program, which ends its workers by signals
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    @property
    def step(self) -> int:
        """Number of updates done, if the program resumed from the newest checkpoint or has given its step."""
        return self.base + max(self.counts.values())

    def count(self, which: str) -> None:
        """Counts a call; reports the step now and then."""
        self.counts[which] += 1
        if self.events is not None and time.monotonic() >= self.next_report:
            self.report()

    def report(self) -> None:
        """Writes the step to the run's events."""
        assert self.events is not None
        if not self.next_report:
            self.events.append(RunStarted(step=self.base, ranks=self.place.size))
        elif self.step > self.reported:
            self.events.append(Train(step=self.step, steps=self.step - self.reported))
        self.reported, self.next_report = self.step, time.monotonic() + REPORT_S

    def checkpoint_saved(self, step: int) -> None:
        """See the function of this name."""
        assert self.events is not None
        is_new = step != self.saved
        self.saved = self.base = step
        self.counts = dict.fromkeys(self.counts, 0)
        self.report()
        if is_new:
            write_atomically(self.run_dir.saved_step, f"{step}\n".encode(), self.run_dir.path)
            self.events.append(CheckpointSaved(step=step))


def agreement() -> Agree:
    """Returns what makes the ranks agree: true on all of them, one call after any of them gave true."""
    distributed: Any = sys.modules.get("torch.distributed")
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        from hpctrain.backends.torch.reduce.any_of import start_any

        return delayed(start_any())
    if mpi is not None and mpi.Is_initialized() and mpi.COMM_WORLD.size > 1:
        return delayed(start_any_over_mpi(mpi))
    raise UserError(
        "stop_requested(agree=True): neither torch.distributed nor mpi4py connects the ranks",
        "call it after init_process_group, or import mpi4py.MPI; or combine stop_requested() over the ranks yourself",
    )


def delayed(start: Callable[[bool], Callable[[], bool]]) -> Agree:
    """Returns a function that starts an exchange of this rank's flag, and returns the result of the one before.

    That one's messages have travelled during the step, so reading its result does not block. The first true is final:
    no exchange follows it.
    """
    agreed = False
    pending: Callable[[], bool] = bool

    def agree(mine: bool) -> bool:
        nonlocal agreed, pending
        agreed = agreed or pending()
        if not agreed:
            pending = start(mine)
        return agreed

    return agree


def start_any_over_mpi(mpi: Any) -> Callable[[bool], Callable[[], bool]]:
    """Returns a function that starts an exchange of flags over MPI, and returns what reads the result. Collective."""
    comm = mpi.COMM_WORLD.Dup()

    def start(mine: bool) -> Callable[[], bool]:
        flags = np.array([mine], dtype=np.int32)
        result = np.zeros(1, dtype=np.int32)
        request = comm.Iallreduce(flags, result, mpi.MAX)

        def read() -> bool:
            request.Wait()
            return bool(flags[0] or result[0])

        return read

    return start
