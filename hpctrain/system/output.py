"""Where a rank's output goes: rank 0's standard output to the user, everything else to the rank's log."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TextIO

from hpctrain.system import foreign_text
from hpctrain.system.files import open_log

TERMINAL = "HPCTRAIN_TERMINAL"
"""Environment variable of supervised ranks: columns of the terminal that the user looks at, 0 if there is none."""

LOGGER = logging.getLogger("hpctrain")
"""Gets what a program that trains tells its user; without a handler of the program's it shows nothing."""
LOGGER.addHandler(logging.NullHandler())

QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "HOROVOD_LOG_LEVEL": "error", "GRPC_VERBOSITY": "ERROR"}
"""Variables that keep libraries from talking at start-up."""


def quiet_environment(verbose: bool, given: Mapping[str, str]) -> dict[str, str]:
    """Those of QUIET that the user has not set; none with --verbose."""
    return {} if verbose else {name: value for name, value in QUIET.items() if name not in given}


def terminal_columns(stream: TextIO) -> int:
    """Width of the terminal behind a stream, 0 if it is none."""
    try:
        return os.get_terminal_size(stream.fileno()).columns if stream.isatty() else 0
    except (OSError, ValueError):
        return 0


def shown_columns() -> int:
    """Width of the terminal that the user sees this process's standard output on, 0 if there is none.

    Launchers put pseudo-terminals in between, so a supervised rank believes its supervisor.
    """
    told = os.environ.get(TERMINAL)
    return int(told) if told else terminal_columns(sys.stdout)


def redirect(log: Path, root: Path, keep_stdout: bool) -> int:
    """Points standard error, and standard output unless it is kept, of this process and its libraries to a log.

    Args:
        log: appended to; made if need be. Output stays where it is if that is impossible.
        root: the run folder, below which no link is followed.
        keep_stdout: leave standard output alone.

    Returns:
        A descriptor of the former standard error, for the one message that the user must see.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(2)
    with contextlib.suppress(OSError):
        handle = open_log(log, root)
        os.dup2(handle, 2)
        if not keep_stdout:
            os.dup2(handle, 1)
        os.close(handle)
    return kept


@contextlib.contextmanager
def kept_output() -> Iterator[None]:
    """Points standard output and error back to where they went before, if the body ends well.

    After an error they stay: the tracebacks of many ranks belong into their logs.
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


def say(text: str) -> bool:
    """To the person in front of the terminal, or reading the job's output; see ``tell``."""
    return tell(f"hpctrain: {text}")


def tell(text: str, end: str = "\n") -> bool:
    """Text on standard error; False if it could not be written, to a full disk for instance: nothing ends for that."""
    try:
        foreign_text.show(text, sys.stderr, end)
    except (OSError, ValueError):
        _discard(sys.stderr)
        return False
    return True


def _discard(stream: TextIO) -> None:
    """Drops what a failed write left in the buffer: Python would fail to write it again at exit, and exit with 120."""
    with contextlib.suppress(OSError, ValueError):
        handle = stream.fileno()
        kept, nowhere = os.dup(handle), os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.dup2(nowhere, handle)
            stream.flush()
        finally:
            os.dup2(kept, handle)
            os.close(kept)
            os.close(nowhere)
