"""Handles signals that ask a process to stop: handlers only record them."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Any

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


class Interrupted(Exception):
    """A stop signal arrived during work that is no longer needed."""

    def __init__(self, number: int) -> None:
        super().__init__(signal_name(number))
        self.number = number


class StopSignals:
    """Records stop signals. ``install`` replaces their handlers by ones that only record.

    Args:
        received: list to which they are appended; by default a new one.
    """

    def __init__(self, received: list[int] | None = None) -> None:
        self.received = [] if received is None else received
        self._previous: dict[int, Any] = {}
        self._interrupts = False

    def install(self) -> None:
        """Installs the handlers; main thread only. Ignored signals of a terminal (nohup) stay ignored."""
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN or number not in (signal.SIGINT, signal.SIGHUP):
                self._previous[number] = signal.signal(number, self._note)

    def restore(self) -> None:
        """Restores the former handlers."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Blocks the signals while the body starts a program; the child calls ``leave_to_program`` before exec.

        Otherwise a signal sent to all processes of a job between fork and exec would be lost: the child would record
        it with the inherited handler and forget it at exec.
        """
        before = signal.pthread_sigmask(signal.SIG_BLOCK, self._previous)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def leave_to_program(self) -> None:
        """Restores the default actions and unblocks the signals, so that a pending one ends this process."""
        for number in self._previous:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._previous)

    @property
    def first(self) -> int:
        """Number of the first signal received; 0 if there was none."""
        return self.received[0] if self.received else 0

    @property
    def insisted(self) -> bool:
        """Whether Ctrl-C was pressed twice."""
        return self.received.count(signal.SIGINT) > 1

    @contextlib.contextmanager
    def interrupting(self) -> Iterator[None]:
        """In the body, a signal raises ``Interrupted``, also one received earlier; main thread only."""
        try:
            self._interrupts = True
            if self.received:
                raise Interrupted(self.first)
            yield
        finally:
            self._interrupts = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)
        if self._interrupts:
            self._interrupts = False  # only once, so that cleanup is not interrupted
            raise Interrupted(number)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """In the body, a stop signal raises ``Interrupted``; main thread only."""
    signals = StopSignals()
    signals.install()
    try:
        with signals.interrupting():
            yield
    finally:
        signals.restore()


class InterruptibleStopSignals(StopSignals):
    """StopSignals for a process without a supervisor: a second Ctrl-C ends it at once."""

    def _note(self, number: int, frame: FrameType | None) -> None:
        super()._note(number, frame)
        if self.insisted:
            raise KeyboardInterrupt


def signal_name(number: int) -> str:
    """Name of a signal, such as SIGKILL for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
