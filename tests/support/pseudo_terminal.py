"""Run ``hpctrain`` on a pseudo-terminal from a test, and see what a user would."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tests.support.command import HPCTRAIN, environment
from tests.support.mpi import PATIENCE_S

SEQUENCE = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|[()][A-Z0-9]|[=>78])")
ON, OFF = "\x1b[?1049h", "\x1b[?1049l"
"""Escape sequences that switch to the alternate screen and back."""


@dataclass
class Terminal:
    """A terminal that runs one command."""

    child: subprocess.Popen[bytes]
    keyboard: int
    text: str = ""

    def read(self, seconds: float) -> bool:
        """Read the command's output for up to some seconds; return False once the command has ended."""
        ready, _, _ = select.select([self.keyboard], [], [], seconds)
        try:
            data = os.read(self.keyboard, 1 << 16) if ready else b"-"
        except OSError:  # the other side is closed
            data = b""
        self.text += data.decode(errors="replace") if ready else ""
        return bool(data)

    def wait_for(self, what: str, condition: Callable[[str], object], timeout_s: float = PATIENCE_S) -> None:
        """Read until the newest picture satisfies a condition."""
        deadline = time.monotonic() + timeout_s
        while not condition(self.pictures()[-1] if self.pictures() else ""):
            assert time.monotonic() < deadline and self.read(0.2), f"no {what}; the terminal shows\n{self.text}"

    def press(self, keys: bytes) -> None:
        """Send keys, as from a keyboard."""
        os.write(self.keyboard, keys)

    def end(self, timeout_s: float = PATIENCE_S) -> int:
        """Read until the command has ended, and return its exit code."""
        deadline = time.monotonic() + timeout_s
        while self.read(0.2):
            assert time.monotonic() < deadline, f"no end; the terminal shows\n{self.text}"
        return self.child.wait(PATIENCE_S)

    def pictures(self) -> list[str]:
        """Successive contents of the alternate screen, without colours."""
        drawn = self.text.partition(ON)[2].partition(OFF)[0].split("\x1b[H")
        return [plain for each in drawn if (plain := SEQUENCE.sub("", each).replace("\r", "")).strip()]

    def left_behind(self) -> str:
        """Contents of the terminal after the alternate screen was left."""
        return SEQUENCE.sub("", self.text.rpartition(OFF)[2]).replace("\r", "")


@contextmanager
def on_a_terminal(*words: object, columns: int = 100, rows: int = 40) -> Iterator[Terminal]:
    """A command on its own terminal; it is killed if it still runs at the end."""
    keyboard, screen = pty.openpty()
    fcntl.ioctl(screen, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    made = {**environment(), "TERM": "xterm-256color"}
    for name in ("NO_COLOR", "COLUMNS", "LINES"):
        made.pop(name, None)
    child = subprocess.Popen(
        [*HPCTRAIN, *map(str, words)],
        env=made,
        stdin=screen,
        stdout=screen,
        stderr=screen,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509 (Ctrl-C must reach it)
    )
    os.close(screen)
    try:
        yield Terminal(child, keyboard)
    finally:
        child.kill()
        child.wait(PATIENCE_S)
        os.close(keyboard)
