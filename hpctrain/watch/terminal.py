"""The live view: draws on the terminal until the run has ended or the user quits."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console, Group
from rich.live import Live

from hpctrain.watch.screen import ASCII, UNICODE, Glyphs, draw
from hpctrain.watch.view import View

POLL_S = 2.0
"""Seconds between two looks at the run."""
LEAVE = b"qQ\x03\x04"
"""Keys that end the view: q, Ctrl-C, Ctrl-D."""
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Terminated(Exception):
    """Somebody ends this process; the terminal is put in order first."""


def show(look: Callable[[], View], console: Console) -> None:
    """Draws what ``look`` gives, every two seconds. When the run has ended, its last view stays on the terminal."""
    glyphs = glyphs_for(console)
    view = None
    screen = Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop")
    with _terminated(), contextlib.suppress(Terminated), _keys() as wait_for_key, screen:
        while True:
            view = look()
            lines = draw(view, console.width, console.height - 1, glyphs)
            screen.update(Group(*lines, "[dim]q ends this view, not the run[/dim]"), refresh=True)
            if view.state.is_over or wait_for_key(0.0 if view.is_behind else POLL_S):
                break
    if view is not None and view.state.is_over:
        print_once(view, console)


def print_once(view: View, console: Console) -> None:
    """One snapshot as lines."""
    for line in draw(view, console.width, 60, glyphs_for(console)):
        console.print(line, soft_wrap=True)


def glyphs_for(console: Console) -> Glyphs:
    """Blocks, if the output can show them."""
    try:
        UNICODE.levels.encode(console.encoding)
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return UNICODE


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """A function that waits up to a number of seconds for a key that ends the view, and says whether it came."""
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


@contextlib.contextmanager
def _terminated() -> Iterator[None]:
    """Turns signals into an exception, so that the terminal is left as it was.

    SIGINT is among them since what a script starts in the background ignores it.
    """

    def leave(number: int, frame: Any) -> None:
        raise Terminated

    former = {number: signal.signal(number, leave) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
