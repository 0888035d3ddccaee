"""Directs a rank's output: rank 0's stdout to the user, everything else to the rank's log."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TextIO

from hpctrain.system import foreign_text
from hpctrain.system.files import open_log

SHOWN_S = 5.0
"""Longest wait for a terminal to show a message of a process that has others to watch."""
TERMINAL = "HPCTRAIN_TERMINAL"
"""Environment variable of supervised ranks: columns of the user's terminal, 0 if there is none."""

LOGGER = logging.getLogger("hpctrain")
"""Receives messages for the user of a program that trains; silent unless the program installs a handler."""
LOGGER.addHandler(logging.NullHandler())

QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "HOROVOD_LOG_LEVEL": "error", "GRPC_VERBOSITY": "ERROR"}
"""Environment variables that silence libraries at start-up."""


def quiet_environment(verbose: bool, given: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of QUIET that the user has not set; none with --verbose."""
    return {} if verbose else {name: value for name, value in QUIET.items() if name not in given}


def terminal_columns(stream: TextIO) -> int:
    """Width of the terminal behind a stream; 0 if it is not a terminal."""
    try:
        return os.get_terminal_size(stream.fileno()).columns if stream.isatty() else 0
    except (OSError, ValueError):
        return 0


def shown_columns() -> int:
    """Width of the terminal on which the user sees this process's stdout; 0 if there is none.

    Launchers insert pseudo-terminals, so a supervised rank uses the width that its supervisor passes.
    """
    columns = os.environ.get(TERMINAL)
    return int(columns) if columns else terminal_columns(sys.stdout)


def redirect(log: Path, root: Path, keep_stdout: bool) -> int:
    """Redirects stderr, and stdout unless it is kept, of this process and its libraries to a log.

    Unless stdin is a terminal, it is empty from now on: Open MPI gives rank 0 a pipe that never ends, in which a
    question to a person would wait forever.

    Args:
        log: file to append to, created if missing. If it cannot be opened, output is not redirected.
        root: the run folder, below which no link is followed.
        keep_stdout: leave stdout alone.

    Returns:
        A descriptor of the former stderr, for the one message that the user must see.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(2)
    if not os.isatty(0):
        with open(os.devnull, "rb") as empty:
            os.dup2(empty.fileno(), 0)
    with contextlib.suppress(OSError):
        handle = open_log(log, root)
        os.dup2(handle, 2)
        if not keep_stdout:
            os.dup2(handle, 1)
        os.close(handle)
    return kept


@contextlib.contextmanager
def kept_output() -> Iterator[None]:
    """Context manager that restores stdout and stderr afterwards, unless the body raises.

    After an error they stay redirected: the tracebacks of many ranks belong in their logs.
    """
    kept = {descriptor: os.dup(descriptor) for descriptor in (1, 2)}
    try:
        yield
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor, former in kept.items():
            os.dup2(former, descriptor)
    finally:
        for former in kept.values():
            os.close(former)


def say(text: str, most_s: float | None = None) -> bool:
    """Writes a message to stderr with the prefix "hpctrain: "; see ``tell``."""
    return tell(f"hpctrain: {text}", most_s=most_s)


def tell(text: str, end: str = "\n", most_s: float | None = None) -> bool:
    """Writes text to stderr. Returns False, rather than failing, if it could not be written (full disk).

    ``most_s``: longest wait in seconds for a terminal that shows nothing (Ctrl-S, a pager); None waits until it does.
    """
    try:
        if most_s is not None and not _takes_text(sys.stderr, most_s):
            return False
        foreign_text.show(text, sys.stderr, end)
    except (OSError, ValueError):
        _discard(sys.stderr)
        return False
    return True


def _takes_text(stream: TextIO, most_s: float) -> bool:
    """Whether a terminal or pipe takes text within this time; True for anything else."""
    try:
        return bool(select.select([], [stream], [], most_s)[1])
    except (OSError, ValueError):  # no descriptor
        return True


def _discard(stream: TextIO) -> None:
    """Discards what a failed write left in the buffer: Python would fail again at exit, with exit code 120."""
    with contextlib.suppress(OSError, ValueError):
        handle = stream.fileno()
        kept = os.dup(handle)
        nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.dup2(nowhere, handle)
            stream.flush()
        finally:
            os.dup2(kept, handle)
            os.close(kept)
            os.close(nowhere)
