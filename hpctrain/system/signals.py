"""Signals that ask a process to stop: they only set a flag."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Any

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


class Interrupted(Exception):
    """A stop signal came while this process worked on something that is no longer needed."""

    def __init__(self, number: int) -> None:
        super().__init__(signal_name(number))
        self.number = number


class StopSignals:
    """Signals that ask this process to stop. ``install`` replaces their handlers by ones that only take a note."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self._previous: dict[int, Any] = {}
        self._interrupts = False

    def install(self) -> None:
        """From the main thread only. A signal that is being ignored (nohup) stays ignored."""
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._note)

    def restore(self) -> None:
        """Gives the signals their former handlers back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Signals wait while the body starts a program, whose process calls ``leave_to_program`` before it is that.

        One that schedulers send to all processes of a job would else come to nothing between fork and exec: the new
        process notes it, as this one does, and forgets.
        """
        before = signal.pthread_sigmask(signal.SIG_BLOCK, self._previous)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def leave_to_program(self) -> None:
        """Signals end this process, one that has waited too; a program may want something else of them."""
        for number in self._previous:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._previous)

    @property
    def first(self) -> int:
        """Number of the first signal, 0 if none came."""
        return self.received[0] if self.received else 0

    @contextlib.contextmanager
    def interrupting(self) -> Iterator[None]:
        """A signal, also one that came before, ends the body by ``Interrupted``; in the main thread."""
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
            self._interrupts = False  # once: what cleans up is not interrupted
            raise Interrupted(number)


class InterruptibleStopSignals(StopSignals):
    """The same for a process without a supervisor: a second Ctrl-C ends it at once."""

    def _note(self, number: int, frame: FrameType | None) -> None:
        super()._note(number, frame)
        if self.received.count(signal.SIGINT) > 1:
            raise KeyboardInterrupt


def signal_name(number: int) -> str:
    """SIGKILL for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
